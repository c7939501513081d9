//! What TLS needs: the server's certificate and key, and whose certificates clients must have.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use rustls::ServerConfig;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use udm::error::{Error, Kind, Result};
use udm::sync::Arc;

use super::uri::Tls;

/// The server's certificate, followed by those between it and the authority's.
pub(crate) const CERTIFICATE: &str = "server-cert.pem";
/// Its private key.
const KEY: &str = "server-key.pem";
/// The authority whose certificates clients have.
const AUTHORITY: &str = "ca-cert.pem";
/// Certificates that the authority took back; may be missing.
const REVOKED: &str = "ca-crl.pem";
/// Bytes of such a file at most.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Reads the files of `tls.folder`. TLS 1.3 and 1.2, without session resumption on disk.
pub fn configure(tls: &Tls) -> Result<Arc<ServerConfig>> {
    let folder = tls.folder.as_path();
    let provider = Arc::new(ring::default_provider());
    let certificates = read_all(&folder.join(CERTIFICATE))?;
    let key_path = folder.join(KEY);
    let key = PrivateKeyDer::from_pem_slice(&read(&key_path)?)
        .map_err(|error| wrong(&key_path, format!("holds no private key: {error:?}")))?;
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::new(Kind::Unsupported, format!("TLS: {error}")))?;
    let builder = if tls.takes_any_client {
        builder.with_no_client_auth()
    } else {
        builder.with_client_cert_verifier(verifier(folder, &provider)?)
    };
    let config = builder
        .with_single_cert(certificates, key)
        .map_err(|error| wrong(&key_path, format!("does not go with {CERTIFICATE}: {error}")))?;
    Ok(Arc::new(config))
}

/// Whether TLS can be spoken at all: the versions and ciphers are there, and randomness.
pub(crate) fn try_out() -> Result<()> {
    let provider = Arc::new(ring::default_provider());
    let failed = |what: String| Error::new(Kind::Unsupported, format!("TLS: {what}"));
    let mut bytes = [0; 32];
    let filled = provider.secure_random.fill(&mut bytes);
    filled.map_err(|_| failed("the system has no randomness".into()))?;
    let builder = ServerConfig::builder_with_provider(provider);
    builder.with_safe_default_protocol_versions().map_err(|error| failed(error.to_string()))?;
    Ok(())
}

/// Checks that a client's certificate is one of the authority's and was not taken back.
fn verifier(folder: &Path, provider: &Arc<CryptoProvider>) -> Result<Arc<dyn ClientCertVerifier>> {
    let path = folder.join(AUTHORITY);
    let mut roots = rustls::RootCertStore::empty();
    for certificate in read_all::<CertificateDer<'_>>(&path)? {
        roots.add(certificate).map_err(|error| wrong(&path, error.to_string()))?;
    }
    let mut builder =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone());
    let revoked = folder.join(REVOKED);
    if revoked.exists() {
        builder = builder.with_crls(read_all::<CertificateRevocationListDer<'_>>(&revoked)?);
    }
    builder.build().map_err(|error| wrong(&path, error.to_string()))
}

/// Every part of that kind in the file at `path`, at least one.
fn read_all<T: PemObject>(path: &Path) -> Result<Vec<T>> {
    let bytes = read(path)?;
    let parts: std::result::Result<Vec<T>, _> = T::pem_slice_iter(&bytes).collect();
    match parts {
        Ok(parts) if !parts.is_empty() => Ok(parts),
        Ok(_) => Err(wrong(path, "holds none of what it is read for".into())),
        Err(error) => Err(wrong(path, format!("is no PEM file: {error:?}"))),
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    let failed = |error| Error::from_io("TLS: reading", path.display(), error);
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(failed)?;
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(wrong(path, format!("is longer than {FILE_BYTES_MAX} bytes")));
    }
    Ok(bytes)
}

fn wrong(path: &Path, why: String) -> Error {
    Error::new(Kind::Invalid, format!("TLS: {} {why}", path.display()))
}

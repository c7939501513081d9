//! Certificates for TLS: the server's certificate and key, and the authority of the clients'
//! certificates.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ParsedCertificate, VerifierBuilderError, WebPkiClientVerifier};
use rustls::{CertificateError, ServerConfig};
use udm::error::{Error, Kind, Result};
use udm::sync::{Arc, Mutex, lock};

use super::der;
use super::uri::Tls;

/// The server's certificate, followed by the intermediate certificates up to the authority's.
pub(crate) const CERTIFICATE: &str = "server-cert.pem";
/// The server's private key.
const KEY: &str = "server-key.pem";
/// The authority that signs the clients' certificates.
const AUTHORITY: &str = "ca-cert.pem";
/// The revoked certificates of the authority; the file may be missing.
const REVOKED: &str = "ca-crl.pem";
/// Maximum bytes of such a file.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The files and the configuration made from them, for an export that lives longer than its
/// certificates.
#[derive(Debug)]
pub(crate) struct Certificates {
    tls: Tls,
    known: Mutex<Known>,
}

#[derive(Debug)]
struct Known {
    /// The stamps of the files when they were last read.
    stamps: Stamps,
    config: Arc<ServerConfig>,
    /// The error in newer files, which are not used.
    problem: Option<String>,
}

/// Each existing file's inode, length and times.
type Stamps = [Option<(u64, u64, i64, i64, i64, i64)>; 4];

impl Certificates {
    /// Reads the files.
    pub fn open(tls: &Tls) -> Result<Certificates> {
        let stamps = stamps(&tls.folder);
        let known = Known { stamps, config: configure(tls)?, problem: None };
        Ok(Certificates { tls: tls.clone(), known: Mutex::new(known) })
    }

    /// Returns the configuration for the next client, and first reads the files again if they have
    /// changed. If the new files have an error, the old configuration is used until the files
    /// change again.
    pub fn current(&self) -> Arc<ServerConfig> {
        let stamps = stamps(&self.tls.folder);
        let mut known = lock(&self.known);
        if stamps != known.stamps {
            known.stamps = stamps;
            match configure(&self.tls) {
                Ok(config) => (known.config, known.problem) = (config, None),
                Err(error) => known.problem = Some(error.to_string()),
            }
        }
        known.config.clone()
    }

    /// Returns the error in the current files, if they are not used.
    pub fn problem(&self) -> Option<String> {
        lock(&self.known).problem.clone()
    }

    /// Returns notes for the user who opens this export.
    pub fn notes(&self) -> Vec<String> {
        let path = self.tls.folder.join(KEY);
        let Ok(meta) = path.metadata() else { return Vec::new() };
        let (path, own) = (path.display(), rustix::process::geteuid().as_raw());
        let (mode, owner) = (meta.mode() & 0o7777, meta.uid());
        let mut notes = Vec::new();
        if mode & 0o066 != 0 {
            let can = if mode & 0o044 != 0 { "read" } else { "change" };
            notes.push(format!(
                "{path} has mode {mode:04o}: other users may {can} the private key; `chmod 600`"
            ));
        }
        if owner != 0 && owner != own {
            notes.push(format!(
                "{path} belongs to user {owner}, who may read the private key; `chown {own}`"
            ));
        }
        notes
    }
}

fn stamps(folder: &Path) -> Stamps {
    [CERTIFICATE, KEY, AUTHORITY, REVOKED].map(|name| {
        let meta = std::fs::metadata(folder.join(name)).ok()?;
        let (modified, changed) = (meta.mtime(), meta.ctime());
        Some((meta.ino(), meta.len(), modified, meta.mtime_nsec(), changed, meta.ctime_nsec()))
    })
}

/// Reads the files of `tls.folder`. TLS 1.3 and 1.2, without session resumption on disk.
pub fn configure(tls: &Tls) -> Result<Arc<ServerConfig>> {
    let folder = tls.folder.as_path();
    let provider = Arc::new(ring::default_provider());
    let (certificate_path, key_path) = (folder.join(CERTIFICATE), folder.join(KEY));
    let certificates = read_all(&certificate_path)?;
    check_servers(&certificate_path, &certificates, &provider)?;
    let key = read_key(&key_path)?;
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::new(Kind::Unsupported, format!("TLS: {error}")))?;
    let builder = if tls.takes_any_client {
        builder.with_no_client_auth()
    } else {
        builder.with_client_cert_verifier(verifier(folder, &provider)?)
    };
    let config = builder.with_single_cert(certificates, key).map_err(|error| match error {
        rustls::Error::InconsistentKeys(_) => wrong(
            &key_path,
            format!("does not match {CERTIFICATE}, which is the certificate of another key"),
        ),
        rustls::Error::InvalidCertificate(error) => {
            wrong(&certificate_path, format!("does not parse: {error}"))
        }
        // The key has the form of a key, so "failed to parse" would mislead.
        rustls::Error::General(_) => wrong(
            &key_path,
            "is not a key that TLS can use here, or its parts do not agree: RSA of 2048 to 4096 \
             bits, ECDSA on P-256 or P-384, and Ed25519 can be used"
                .into(),
        ),
        error => wrong(&key_path, format!("cannot be used with {CERTIFICATE}: {error}")),
    })?;
    Ok(Arc::new(config))
}

/// Reads the private key in the file at `path`.
fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>> {
    let bytes = read(path)?;
    let key = PrivateKeyDer::from_pem_slice(&bytes).map_err(|error| match error {
        pem::Error::NoItemsFound if String::from_utf8_lossy(&bytes).contains("ENCRYPTED") => {
            wrong(path, "is encrypted: udm takes a private key without a password".into())
        }
        pem::Error::NoItemsFound => wrong(path, "holds no private key".into()),
        error => wrong(path, format!("does not parse: {error}")),
    })?;
    if !der::has_form(&key) {
        return Err(wrong(path, "does not parse: its DER is damaged or incomplete".into()));
    }
    Ok(der::with_whole_number(key))
}

/// Returns an error if clients cannot accept the first of `certificates` as a server's now. Its
/// issuer is not checked, because it need not be the authority that signs the clients'
/// certificates.
fn check_servers(
    path: &Path,
    certificates: &[CertificateDer<'_>],
    provider: &CryptoProvider,
) -> Result<()> {
    let Some((own, others)) = certificates.split_first() else { return Ok(()) };
    let parsed = ParsedCertificate::try_from(own)
        .map_err(|error| wrong(path, format!("does not parse: {error}")))?;
    let roots = rustls::RootCertStore::empty();
    let algorithms = provider.signature_verification_algorithms.all;
    let now = UnixTime::now();
    let checked =
        verify_server_cert_signed_by_trust_anchor(&parsed, &roots, others, now, algorithms);
    let Err(rustls::Error::InvalidCertificate(error)) = checked else { return Ok(()) };
    let age = |then: UnixTime| days(now.as_secs().abs_diff(then.as_secs()));
    match error {
        CertificateError::ExpiredContext { not_after, .. } => {
            Err(wrong(path, format!("expired {} ago", age(not_after))))
        }
        CertificateError::NotValidYetContext { not_before, .. } => {
            Err(wrong(path, format!("becomes valid in {}", age(not_before))))
        }
        CertificateError::InvalidPurposeContext { .. } | CertificateError::InvalidPurpose => {
            let what = "is not a server's certificate: its extended key usage lacks serverAuth, \
                        as a client's does";
            Err(wrong(path, what.into()))
        }
        _ => Ok(()),
    }
}

/// Formats a time, roughly.
fn days(seconds: u64) -> String {
    match seconds {
        0..7200 => format!("{} minutes", seconds / 60),
        7200..172_800 => format!("{} hours", seconds / 3600),
        _ => format!("{} days", seconds / 86400),
    }
}

/// Checks that TLS works at all: versions, ciphers and randomness.
pub(crate) fn try_out() -> Result<()> {
    let provider = Arc::new(ring::default_provider());
    let failed = |what: String| Error::new(Kind::Unsupported, format!("TLS: {what}"));
    let mut bytes = [0; 32];
    let filled = provider.secure_random.fill(&mut bytes);
    filled.map_err(|_| failed("the system provides no random numbers".into()))?;
    let builder = ServerConfig::builder_with_provider(provider);
    builder.with_safe_default_protocol_versions().map_err(|error| failed(error.to_string()))?;
    Ok(())
}

/// Creates the check that the authority has signed a client's certificate and not revoked it.
fn verifier(folder: &Path, provider: &Arc<CryptoProvider>) -> Result<Arc<dyn ClientCertVerifier>> {
    let path = folder.join(AUTHORITY);
    let mut roots = rustls::RootCertStore::empty();
    for certificate in read_all::<CertificateDer<'_>>(&path)? {
        let added = roots.add(certificate);
        added.map_err(|error| wrong(&path, format!("does not parse: {error}")))?;
    }
    let mut builder =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone());
    let revoked = folder.join(REVOKED);
    if revoked.exists() {
        let lists = read_all::<CertificateRevocationListDer<'_>>(&revoked)?;
        lists.iter().try_for_each(|list| check_age(&revoked, list))?;
        builder = builder.with_crls(lists).enforce_revocation_expiration();
    }
    builder.build().map_err(|error| match error {
        VerifierBuilderError::InvalidCrl(error) => {
            wrong(&revoked, format!("does not parse: {error:?}"))
        }
        error => wrong(&path, error.to_string()),
    })
}

/// Returns an error if the revocation list is out of date: with the old list, clients with newly
/// revoked certificates would be accepted.
fn check_age(path: &Path, list: &[u8]) -> Result<()> {
    let (now, due) = (UnixTime::now().as_secs(), der::next_update(list).unwrap_or(u64::MAX));
    if now <= due {
        return Ok(());
    }
    let age = days(now - due);
    let what = format!("is too old: a newer list of revoked certificates was due {age} ago");
    Err(wrong(path, what))
}

/// Reads every part of that kind in the file at `path`, at least one.
fn read_all<T: PemObject>(path: &Path) -> Result<Vec<T>> {
    let bytes = read(path)?;
    let parts: std::result::Result<Vec<T>, _> = T::pem_slice_iter(&bytes).collect();
    match parts {
        Ok(parts) if !parts.is_empty() => Ok(parts),
        Ok(_) => Err(wrong(path, "holds no PEM item of the expected kind".into())),
        Err(error) => Err(wrong(path, format!("does not parse: {error}"))),
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

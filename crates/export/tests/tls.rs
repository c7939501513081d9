//! NBD under TLS, without a socket: rustls as the client, every message cut at random places in
//! both directions. The answers are the same as without TLS, and clients that do not encrypt get
//! none.

#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, OnceLock};

use proptest::prelude::*;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig};
use udm::bio::{Bio, Op};
use udm::buffer::{Buffer, BufferPool};
use udm::queue::Conversation;
use udm_export::nbd::connection::Connection;
use udm_export::nbd::handshake::ExportInfo;
use udm_export::nbd::secure::Secured;
use udm_export::nbd::uri::Tls;

const SIZE: usize = 4 << 20;
const ERR_TLS_REQD: u32 = 1 << 31 | 5;

/// What both sides need.
struct Configs {
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
    /// A client without a certificate.
    stranger: Arc<ClientConfig>,
}

/// Made once.
fn configs() -> &'static Configs {
    static CONFIGS: OnceLock<Configs> = OnceLock::new();
    CONFIGS.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/certificates.sh");
        let made = Command::new(script).arg(folder.path()).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let tls = Tls { folder: folder.path().into(), takes_any_client: false };
        let server = udm_export::nbd::tls::configure(&tls).unwrap();
        let read = |name: &str| std::fs::read(folder.path().join(name)).unwrap();
        let certificate = |name| CertificateDer::from_pem_slice(&read(name)).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(certificate("ca-cert.pem")).unwrap();
        let key = PrivateKeyDer::from_pem_slice(&read("client-key.pem")).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let stranger = Arc::new(builder.clone().with_no_client_auth());
        let own = vec![certificate("client-cert.pem")];
        let client = Arc::new(builder.with_client_auth_cert(own, key).unwrap());
        Configs { server, client, stranger }
    })
}

/// A server with an array as its device, and the bytes between it and its client.
struct Fixture {
    server: Secured,
    pool: BufferPool,
    bios: VecDeque<Bio>,
    device: Vec<u8>,
    to_server: VecDeque<u8>,
    /// Given out by the server, and whether its buffer was reported as sent.
    to_client: VecDeque<u8>,
    on_way: VecDeque<Buffer>,
    random: u64,
}

impl Fixture {
    fn new(seed: u64) -> Fixture {
        let export = ExportInfo {
            name: "disk".into(),
            size_bytes: SIZE as u64,
            block_bytes: 512,
            minimum_bytes: 512,
            has_discard: true,
            is_read_only: false,
            needs_tls: true,
        };
        Fixture {
            server: Secured::new(Connection::new(export), configs().server.clone()),
            pool: BufferPool::new(),
            bios: VecDeque::new(),
            device: vec![0; SIZE],
            to_server: VecDeque::new(),
            to_client: VecDeque::new(),
            on_way: VecDeque::new(),
            random: seed | 1,
        }
    }

    fn below(&mut self, limit: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random as usize % limit
    }

    fn serve(&mut self, mut bio: Bio) {
        let range = bio.offset as usize..bio.end() as usize;
        match bio.op {
            Op::Read => bio.buffer.as_mut_slice().copy_from_slice(&self.device[range]),
            Op::Write => self.device[range].copy_from_slice(bio.buffer.as_slice()),
            Op::Discard | Op::WriteZeroes => self.device[range].fill(0),
            Op::Flush => {}
        }
        self.server.finished(bio, &mut self.bios, &mut self.pool);
    }

    /// One step of the server's queue, chosen at random. Returns false if it was idle.
    fn step(&mut self) -> bool {
        let first = self.below(4);
        (0..4).any(|n| self.try_step((first + n) % 4))
    }

    fn try_step(&mut self, which: usize) -> bool {
        match which {
            0 => {
                if self.to_server.is_empty() {
                    return false;
                }
                let Some(mut space) = self.server.incoming() else { return false };
                let most = (space.end - space.at).min(self.to_server.len());
                let limit = if self.below(3) == 0 { 40 } else { most };
                let count = 1 + self.below(most.min(limit));
                for byte in &mut space.buffer.as_mut_slice()[space.at..space.at + count] {
                    *byte = self.to_server.pop_front().unwrap();
                }
                self.server.received(space, count, &mut self.bios, &mut self.pool);
                true
            }
            1 => {
                let Some(bio) = self.bios.pop_front() else { return false };
                self.serve(bio);
                true
            }
            2 => {
                let Some(buffer) = self.server.outgoing() else { return false };
                self.to_client.extend(buffer.as_slice());
                self.on_way.push_back(buffer);
                true
            }
            _ => {
                let Some(buffer) = self.on_way.pop_front() else { return false };
                self.server.sent(buffer, &mut self.bios, &mut self.pool);
                true
            }
        }
    }

    fn settle(&mut self) {
        while self.step() {}
    }

    fn take(&mut self, count: usize) -> Vec<u8> {
        assert!(self.to_client.len() >= count, "the server owes an answer");
        self.to_client.drain(..count).collect()
    }
}

fn option(kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = b"IHAVEOPT".to_vec();
    bytes.extend_from_slice(&kind.to_be_bytes());
    bytes.extend_from_slice(&(data.len() as u32).to_be_bytes());
    bytes.extend_from_slice(data);
    bytes
}

fn request(command: u16, cookie: u64, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = 0x2560_9513_u32.to_be_bytes().to_vec();
    bytes.extend_from_slice(&[0, 0]);
    bytes.extend_from_slice(&command.to_be_bytes());
    bytes.extend_from_slice(&cookie.to_be_bytes());
    bytes.extend_from_slice(&(offset as u64).to_be_bytes());
    bytes.extend_from_slice(&(len as u32).to_be_bytes());
    bytes
}

/// The client of a fixture: its half of TLS.
struct Client(ClientConnection);

impl Client {
    /// Greets and asks for TLS.
    fn start(fixture: &mut Fixture) -> Client {
        fixture.settle();
        fixture.take(18);
        fixture.to_server.extend([0, 0, 0, 3]);
        fixture.to_server.extend(option(5, &[]));
        fixture.settle();
        let answer = fixture.take(20);
        assert_eq!(answer[12..16], [0, 0, 0, 1], "STARTTLS is acknowledged");
        let name = ServerName::try_from("localhost").unwrap();
        Client(ClientConnection::new(configs().client.clone(), name).unwrap())
    }

    /// Carries bytes both ways until both sides are silent.
    fn exchange(&mut self, fixture: &mut Fixture) -> Vec<u8> {
        let mut plain = Vec::new();
        loop {
            let mut out = Vec::new();
            while self.0.wants_write() {
                self.0.write_tls(&mut out).unwrap();
            }
            fixture.to_server.extend(&out);
            fixture.settle();
            let came: Vec<u8> = fixture.to_client.drain(..).collect();
            if out.is_empty() && came.is_empty() {
                return plain;
            }
            let mut rest = &mut came.as_slice();
            while !rest.is_empty() {
                self.0.read_tls(&mut rest).unwrap();
                self.0.process_new_packets().unwrap();
                let _ = self.0.reader().read_to_end(&mut plain);
            }
        }
    }

    fn say(&mut self, fixture: &mut Fixture, bytes: &[u8]) -> Vec<u8> {
        self.0.writer().write_all(bytes).unwrap();
        self.exchange(fixture)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Requests of any size, pipelined, through TLS: the device has what was written, and reads
    /// return it.
    #[test]
    fn requests_under_tls_are_served(
        seed in any::<u64>(),
        requests in prop::collection::vec((any::<bool>(), 0..SIZE / 512, 1..1200_usize), 1..12),
    ) {
        let mut fixture = Fixture::new(seed);
        let mut client = Client::start(&mut fixture);
        client.0.set_buffer_limit(None);
        let answer = client.say(&mut fixture, &option(1, b"disk"));
        prop_assert_eq!(answer.len(), 10);
        let mut model = vec![0; SIZE];
        let mut wire = Vec::new();
        let mut due = Vec::new();
        for (cookie, (is_write, sector, count)) in requests.iter().enumerate() {
            let start = sector * 512;
            let len = (count * 512).min(SIZE - start);
            wire.extend(request(u16::from(*is_write), cookie as u64, start, len));
            if *is_write {
                let data: Vec<u8> = (0..len).map(|at| (at * 31 + cookie * 7) as u8).collect();
                model[start..start + len].copy_from_slice(&data);
                wire.extend(data);
            }
            // One at a time where order matters; pipelined if the next request is also a write.
            if !is_write || cookie % 3 == 2 {
                due.extend(client.say(&mut fixture, &std::mem::take(&mut wire)));
                let tail = &due[due.len().saturating_sub(if *is_write { 0 } else { len })..];
                if !is_write {
                    prop_assert!(tail == &model[start..start + len]);
                }
            }
        }
        client.say(&mut fixture, &wire);
        prop_assert!(fixture.device == model);
        client.say(&mut fixture, &request(2, 0, 0, 0));
        prop_assert!(fixture.server.is_over());
        prop_assert_eq!(fixture.server.violation(), None);
        // The good-bye was also encrypted.
        prop_assert!(client.0.process_new_packets().unwrap().peer_has_closed());
    }

    /// The server survives any bytes after STARTTLS, and sends no plain text.
    #[test]
    fn garbage_ends_the_client_alone(seed in any::<u64>(), garbage: Vec<u8>) {
        let mut fixture = Fixture::new(seed);
        let _ = Client::start(&mut fixture);
        fixture.to_server.extend(&garbage);
        fixture.settle();
        let said: Vec<u8> = fixture.to_client.drain(..).collect();
        // The answer is empty, or a TLS alert.
        prop_assert!(said.is_empty() || said[0] == 21, "{said:?}");
        if fixture.server.violation().is_some() {
            prop_assert!(fixture.server.is_over());
        }
    }
}

/// Before TLS every option but STARTTLS and ABORT is refused, and none of them chooses an export.
#[test]
fn nothing_is_served_unencrypted() {
    for (kind, data) in [(3, &[][..]), (6, &[0; 6]), (7, &[0; 6]), (8, &[]), (9, &[0; 8])] {
        let mut fixture = Fixture::new(1);
        fixture.settle();
        fixture.take(18);
        fixture.to_server.extend([0, 0, 0, 3]);
        fixture.to_server.extend(option(kind, data));
        fixture.settle();
        let answer = fixture.take(20);
        assert_eq!(u32::from_be_bytes(answer[12..16].try_into().unwrap()), ERR_TLS_REQD);
        // The client can still do it right.
        fixture.to_client.clear();
        fixture.to_server.extend(option(5, &[]));
        fixture.settle();
        assert_eq!(fixture.take(20)[12..16], [0, 0, 0, 1]);
    }
    let mut fixture = Fixture::new(1);
    fixture.to_server.extend([0, 0, 0, 3]);
    fixture.to_server.extend(option(1, b"disk"));
    fixture.settle();
    assert_eq!(fixture.take(18).len(), 18);
    assert!(fixture.to_client.is_empty() && fixture.server.is_over());
    assert!(fixture.server.violation().unwrap().contains("EXPORT_NAME"));
}

/// Bytes that an attacker inserts after STARTTLS are not taken for the client's.
#[test]
fn words_after_starttls_are_not_taken() {
    let mut fixture = Fixture::new(3);
    fixture.settle();
    fixture.take(18);
    fixture.to_server.extend([0, 0, 0, 3]);
    fixture.to_server.extend([option(5, &[]), option(1, b"disk")].concat());
    // The first step takes everything that is there in one piece.
    let mut space = fixture.server.incoming().unwrap();
    let count = fixture.to_server.len();
    for byte in &mut space.buffer.as_mut_slice()[space.at..space.at + count] {
        *byte = fixture.to_server.pop_front().unwrap();
    }
    fixture.server.received(space, count, &mut fixture.bios, &mut fixture.pool);
    fixture.settle();
    assert!(fixture.server.is_over());
    assert!(fixture.server.violation().unwrap().contains("followed STARTTLS"));
}

/// A second STARTTLS, and one with data, are refused; the connection goes on.
#[test]
fn starttls_comes_once() {
    let mut fixture = Fixture::new(5);
    let mut client = Client::start(&mut fixture);
    let answer = client.say(&mut fixture, &option(5, &[]));
    assert_eq!(answer[12..16], [0x80, 0, 0, 3]);
    assert_eq!(client.say(&mut fixture, &option(1, b"disk")).len(), 10);
}

/// A client without a certificate gets an alert, and no other answer.
#[test]
fn strangers_are_turned_away() {
    let mut fixture = Fixture::new(7);
    let mut client = Client::start(&mut fixture);
    let name = ServerName::try_from("localhost").unwrap();
    client.0 = ClientConnection::new(configs().stranger.clone(), name).unwrap();
    let mut said_no = false;
    for _ in 0..10 {
        let mut out = Vec::new();
        while client.0.wants_write() {
            client.0.write_tls(&mut out).unwrap();
        }
        fixture.to_server.extend(&out);
        fixture.settle();
        let came: Vec<u8> = fixture.to_client.drain(..).collect();
        let mut rest = came.as_slice();
        while !rest.is_empty() {
            client.0.read_tls(&mut rest).unwrap();
            said_no |= client.0.process_new_packets().is_err();
        }
    }
    assert!(said_no && fixture.server.is_over());
    assert!(fixture.server.violation().unwrap().contains("certificate"));
}

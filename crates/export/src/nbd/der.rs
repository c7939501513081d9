//! The small part of DER that udm needs: sequences of elements, the outline of a private key, a
//! private key on an elliptic curve, and the date of a certificate revocation list.

use rustls::pki_types::PrivateKeyDer;

const INTEGER: u8 = 0x02;
const OCTET_STRING: u8 = 0x04;
const OID: u8 = 0x06;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
const SEQUENCE: u8 = 0x30;
/// The curve of a key in SEC 1's form.
const PARAMETERS: u8 = 0xA0;

/// Object identifiers.
const EC_PUBLIC_KEY: &[u8] = &[0x2A, 0x86, 0x48, 0xCE, 0x3D, 0x02, 0x01];
const P_256: &[u8] = &[0x2A, 0x86, 0x48, 0xCE, 0x3D, 0x03, 0x01, 0x07];
const P_384: &[u8] = &[0x2B, 0x81, 0x04, 0x00, 0x22];

/// Takes the first element of `bytes`: its tag and content. `None` if it is truncated.
fn take<'a>(bytes: &mut &'a [u8]) -> Option<(u8, &'a [u8])> {
    let (&tag, rest) = bytes.split_first()?;
    let (&first, rest) = rest.split_first()?;
    let (len, rest) = match first {
        0..=0x7F => (usize::from(first), rest),
        0x81..=0x83 => {
            let (len, rest) = rest.split_at_checked(usize::from(first & 0x7F))?;
            (len.iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte)), rest)
        }
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(len)?;
    *bytes = rest;
    Some((tag, content))
}

/// Like [`take`], for an element that must have this tag.
fn take_as<'a>(tag: u8, bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    take(bytes).filter(|(found, _)| *found == tag).map(|(_, content)| content)
}

/// Encodes an element.
fn put(tag: u8, content: &[u8]) -> Vec<u8> {
    let len = content.len();
    let mut bytes = vec![tag];
    match len {
        0..=0x7F => bytes.push(len as u8),
        0x80..=0xFF => bytes.extend([0x81, len as u8]),
        _ => bytes.extend([0x82, (len >> 8) as u8, len as u8]),
    }
    bytes.extend_from_slice(content);
    bytes
}

/// Whether `key` is one complete element with the parts that every key of its form has. This
/// distinguishes a damaged or truncated key from a key of an unsupported kind.
pub(super) fn has_form(key: &PrivateKeyDer<'_>) -> bool {
    let tags: &[u8] = match key {
        PrivateKeyDer::Pkcs1(_) => &[INTEGER; 9],
        PrivateKeyDer::Sec1(_) => &[INTEGER, OCTET_STRING],
        PrivateKeyDer::Pkcs8(_) => &[INTEGER, SEQUENCE, OCTET_STRING],
        _ => return true,
    };
    let mut bytes = key.secret_der();
    let Some(mut parts) = take_as(SEQUENCE, &mut bytes) else { return false };
    bytes.is_empty() && tags.iter().all(|tag| take_as(*tag, &mut parts).is_some())
}

/// Returns `key` with a private number of its curve's full length. GnuTLS's certtool drops leading
/// zeroes or adds one, and `ring` accepts neither form. Any other key is returned unchanged.
pub(super) fn with_whole_number(key: PrivateKeyDer<'static>) -> PrivateKeyDer<'static> {
    let whole = match &key {
        PrivateKeyDer::Sec1(sec1) => sec1_with_whole_number(sec1.secret_sec1_der(), None)
            .map(|bytes| PrivateKeyDer::Sec1(bytes.into())),
        PrivateKeyDer::Pkcs8(pkcs8) => pkcs8_with_whole_number(pkcs8.secret_pkcs8_der())
            .map(|bytes| PrivateKeyDer::Pkcs8(bytes.into())),
        _ => None,
    };
    whole.unwrap_or(key)
}

fn pkcs8_with_whole_number(mut bytes: &[u8]) -> Option<Vec<u8>> {
    let mut parts = take_as(SEQUENCE, &mut bytes)?;
    let version = take_as(INTEGER, &mut parts)?;
    let algorithm = take_as(SEQUENCE, &mut parts)?;
    let mut inner = algorithm;
    if take_as(OID, &mut inner)? != EC_PUBLIC_KEY {
        return None;
    }
    let curve = take_as(OID, &mut inner)?;
    let key = sec1_with_whole_number(take_as(OCTET_STRING, &mut parts)?, Some(curve))?;
    let all = [put(INTEGER, version), put(SEQUENCE, algorithm), put(OCTET_STRING, &key)];
    Some(put(SEQUENCE, &[&all.concat()[..], parts].concat()))
}

fn sec1_with_whole_number(mut bytes: &[u8], curve: Option<&[u8]>) -> Option<Vec<u8>> {
    let mut parts = take_as(SEQUENCE, &mut bytes)?;
    let version = take_as(INTEGER, &mut parts)?;
    let number = take_as(OCTET_STRING, &mut parts)?;
    let mut rest = parts;
    let named = match take(&mut rest) {
        Some((PARAMETERS, mut parameters)) => take_as(OID, &mut parameters),
        _ => None,
    };
    let len = match curve.or(named)? {
        P_256 => 32,
        P_384 => 48,
        _ => return None,
    };
    let zeroes = number.iter().take_while(|byte| **byte == 0).count();
    let digits = &number[zeroes..];
    let missing = len - Some(digits.len()).filter(|digits| *digits <= len)?;
    let number = [&vec![0; missing][..], digits].concat();
    let all = [put(INTEGER, version), put(OCTET_STRING, &number)];
    Some(put(SEQUENCE, &[&all.concat()[..], parts].concat()))
}

/// Returns the end of a revocation list's validity, in seconds since 1970; `None` if the list has
/// none.
pub(super) fn next_update(mut list: &[u8]) -> Option<u64> {
    let mut signed = take_as(SEQUENCE, &mut list)?;
    let mut parts = take_as(SEQUENCE, &mut signed)?;
    let is_time = |tag| matches!(tag, UTC_TIME | GENERALIZED_TIME);
    // A version, an algorithm and a name precede the two dates.
    for _ in 0..4 {
        if is_time(take(&mut parts)?.0) {
            break;
        }
    }
    let (tag, text) = take(&mut parts)?;
    if !is_time(tag) {
        return None;
    }
    let text = std::str::from_utf8(text).ok()?.strip_suffix('Z')?;
    let (year, text) = match tag {
        UTC_TIME => {
            let (year, text) = text.split_at_checked(2)?;
            let year: u64 = year.parse().ok()?;
            (if year < 50 { 2000 + year } else { 1900 + year }, text)
        }
        _ => {
            let (year, text) = text.split_at_checked(4)?;
            (year.parse().ok()?, text)
        }
    };
    let is_plain = text.len() == 10 && text.bytes().all(|byte| byte.is_ascii_digit());
    let field = |nth: usize| text.get(2 * nth..2 * nth + 2)?.parse::<u64>().ok();
    let is_date = is_plain && year >= 1970 && (1..=12).contains(&field(0)?);
    let days =
        is_date.then(|| days_before(year, field(0).unwrap_or(1)))? + field(1)?.checked_sub(1)?;
    Some(((days * 24 + field(2)?) * 60 + field(3)?) * 60 + field(4)?)
}

/// Days from 1970 to the first of a month.
fn days_before(year: u64, month: u64) -> u64 {
    let is_leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let past = year - 1;
    let leaps = past / 4 - past / 100 + past / 400 - 477;
    let days = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334][month as usize - 1];
    (year - 1970) * 365 + leaps + days + u64::from(month > 2 && is_leap(year))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;
    use rustls::crypto::ring::sign::any_ecdsa_type;

    use super::*;

    const BIT_STRING: u8 = 0x03;
    const PUBLIC_KEY: u8 = 0xA1;

    /// Curves, lengths of their numbers, and the public points of private numbers: first this
    /// many zeroes, then only bytes 0xA5.
    const POINTS: [(&[u8], usize, usize, &str); 4] = [
        (
            P_256,
            32,
            1,
            "c49f802dfa27583c0fbbe6b0c05d1c415019f8f394fd731d1849029446412a2e\
             8c8d4c85cff72ffe62e576ff5e2744fcf42de6e02aae3938a75d22d7072afcd3",
        ),
        (
            P_256,
            32,
            2,
            "cbdac279b924c11af8b16f877c6340e892e1f0c6d6adfb8b061def71a0718727\
             c763f8e880dccb5beae9a4802c28accc092c2054daa957136692d97ab3850ae6",
        ),
        (
            P_384,
            48,
            1,
            "3436073595aeebdd7315408dca6eda633ab68b18fe6294c2\
             2edf47a346343f07bf839c0971c36b0724eaeb6de12964b8\
             2ee994d348226a20fd44afa65c298b4c052f450bdc03c19e\
             c4880a9d471abc049cea46c50ed98fc7b01b8747110bdabc",
        ),
        (
            P_384,
            48,
            2,
            "476e2f80834f0e2c138607f117c328e0dd63339517b393d2\
             93d79cae3141170ce03829835702206f0f341a4b49757fdf\
             5ee7ad547d2f6e4aec679bf53f3011b6cd635791e4e0dbb6\
             9a7074e91b9689c21f214e89288ea68eeb939989dc969a90",
        ),
    ];

    /// An uncompressed point in a bit string.
    fn point(hex: &str) -> Vec<u8> {
        let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        [0, 4].into_iter().chain((0..hex.len()).step_by(2).map(byte)).collect()
    }

    /// A key in SEC 1's form, with this private number and this content of its bit string.
    fn sec1(number: &[u8], curve: &[u8], point: &[u8]) -> Vec<u8> {
        let parts = [
            put(INTEGER, &[1]),
            put(OCTET_STRING, number),
            put(PARAMETERS, &put(OID, curve)),
            put(PUBLIC_KEY, &put(BIT_STRING, point)),
        ];
        put(SEQUENCE, &parts.concat())
    }

    fn pkcs8(number: &[u8], curve: &[u8], point: &[u8]) -> Vec<u8> {
        let algorithm = [put(OID, EC_PUBLIC_KEY), put(OID, curve)].concat();
        let parts = [
            put(INTEGER, &[0]),
            put(SEQUENCE, &algorithm),
            put(OCTET_STRING, &sec1(number, curve, point)),
        ];
        put(SEQUENCE, &parts.concat())
    }

    /// The number without its zeroes, without one of them, complete, and with one more zero: TLS
    /// can use only the complete one, and gets it for all of them.
    #[test]
    fn private_numbers_are_as_long_as_their_curves_numbers() {
        for (curve, len, zeroes, hex) in POINTS {
            let point = point(hex);
            let whole = [vec![0; zeroes], vec![0xA5; len - zeroes]].concat();
            let longer = [&[0][..], &whole].concat();
            for number in [&whole[zeroes..], &whole[1..], &whole[..], &longer[..]] {
                let forms = [
                    (
                        PrivateKeyDer::Sec1(sec1(number, curve, &point).into()),
                        sec1(&whole, curve, &point),
                    ),
                    (
                        PrivateKeyDer::Pkcs8(pkcs8(number, curve, &point).into()),
                        pkcs8(&whole, curve, &point),
                    ),
                ];
                for (key, expected) in forms {
                    assert!(has_form(&key));
                    assert_eq!(any_ecdsa_type(&key).is_ok(), number == whole, "{number:?}");
                    let key = with_whole_number(key);
                    assert_eq!(key.secret_der(), expected);
                    assert!(any_ecdsa_type(&key).is_ok(), "{number:?}");
                }
            }
        }
    }

    #[test]
    fn other_keys_are_not_changed() {
        // Too long, on P-521, or not a key.
        let p_521 = sec1(&[1; 31], &[0x2B, 0x81, 0x04, 0, 0x23], &[0; 134]);
        for bytes in [sec1(&[1; 33], P_256, &[0; 66]), p_521, vec![7]] {
            let key = PrivateKeyDer::Sec1(bytes.clone().into());
            assert_eq!(with_whole_number(key).secret_der(), bytes);
        }
    }

    #[test]
    fn a_truncated_key_does_not_have_its_form() {
        type Form = fn(Vec<u8>) -> PrivateKeyDer<'static>;
        let number = [0xA5; 32];
        let rsa = put(SEQUENCE, &put(INTEGER, &[1]).repeat(9));
        let keys: [(Vec<u8>, Form); 3] = [
            (sec1(&number, P_256, &[0; 66]), |bytes| PrivateKeyDer::Sec1(bytes.into())),
            (pkcs8(&number, P_256, &[0; 66]), |bytes| PrivateKeyDer::Pkcs8(bytes.into())),
            (rsa, |bytes| PrivateKeyDer::Pkcs1(bytes.into())),
        ];
        for (bytes, of) in keys {
            assert!(has_form(&of(bytes.clone())));
            for len in 0..bytes.len() {
                assert!(!has_form(&of(bytes[..len].to_vec())), "{len}");
            }
            assert!(!has_form(&of([&bytes[..], &[0]].concat())));
        }
        // One form in place of another, and a missing part.
        assert!(!has_form(&PrivateKeyDer::Pkcs8(sec1(&number, P_256, &[0; 66]).into())));
        let short = put(SEQUENCE, &put(INTEGER, &[1]).repeat(8));
        assert!(!has_form(&PrivateKeyDer::Pkcs1(short.into())));
    }

    #[test]
    fn a_list_says_until_when_it_counts() {
        let list = |dates: &[Vec<u8>], version: &[u8]| {
            let name = put(SEQUENCE, &[]);
            let parts = [version, &put(SEQUENCE, &[]), &name, &dates.concat()].concat();
            put(SEQUENCE, &[put(SEQUENCE, &parts), put(SEQUENCE, &[])].concat())
        };
        let utc = |text: &str| put(UTC_TIME, text.as_bytes());
        let long = |text: &str| put(GENERALIZED_TIME, text.as_bytes());
        let version = put(INTEGER, &[1]);
        for (date, seconds) in [
            (utc("700101000000Z"), Some(0)),
            (utc("240229235959Z"), Some(1_709_251_199)),
            (utc("261125190000Z"), Some(1_795_633_200)),
            (long("21000301000000Z"), Some(4_107_542_400)),
            (utc("261325190000Z"), None),
            (utc("2611251900Z"), None),
            (long("19691231000000Z"), None),
        ] {
            for version in [&version[..], &[]] {
                let list = list(&[utc("200101000000Z"), date.clone()], version);
                assert_eq!(next_update(&list), seconds, "{date:?}");
            }
        }
        assert_eq!(next_update(&list(&[utc("200101000000Z")], &version)), None);
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let in_list = put(SEQUENCE, &put(SEQUENCE, &bytes));
            let _ = (next_update(&bytes), next_update(&in_list));
            for bytes in [bytes.clone(), put(SEQUENCE, &bytes)] {
                let sec1 = PrivateKeyDer::Sec1(bytes.clone().into());
                let pkcs8 = PrivateKeyDer::Pkcs8(bytes.into());
                for key in [sec1, pkcs8] {
                    has_form(&key);
                    with_whole_number(key);
                }
            }
        }
    }
}

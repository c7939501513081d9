//! The golden media unpack to exactly what the kernel left, so tests may trust them.

mod golden;

#[test]
fn every_image_unpacks_to_its_checksum() {
    for vector in golden::vectors("") {
        let images = vector.manifest["images"].as_object().expect("images");
        for (role, about) in images {
            let image = vector.image(role);
            let expected = about["sha256"].as_str().expect("a checksum");
            assert_eq!(golden::sha256(&image), expected, "{} {role}", vector.name);
        }
    }
}

#[test]
fn an_unpacked_file_equals_the_image_in_memory() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("origin.img");
    let vector = &golden::vectors("pcache-crc-crash")[0];
    vector.unpack("origin", &path);
    let file = std::fs::read(&path).expect("read image");
    assert!(file == vector.image("origin"), "file and memory differ");
}

//! See `udm_fuzz_harness::vhost`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| udm_fuzz_harness::vhost(bytes));

//! The target type cache: known by its metadata device. No table can be made of it yet.

use super::setup::invalid;
use super::{CacheType, Features, Setup, TargetType};
use crate::cache::inspect;
use crate::contents::Shape;
use crate::error::{Error, Kind};

pub(super) const CACHE: TargetType = TargetType {
    name: "cache",
    version: "2.4.0",
    words: "",
    features: Features { is_singleton: false, is_immutable: false },
    roles: &[],
    status_fields: &[],
    limits: Vec::new,
    cache: Some(CacheType {
        format_version: 2,
        begins_anywhere: false,
        has_log: false,
        has_metadata_device: true,
        words_to_accept_damage: "",
        setup: Setup { is_for: None, words: |_| invalid("it cannot be served yet") },
        shape_of: |_| Some(Shape { sectors: 1, words: Vec::new() }),
        is_at: |pmem, _| inspect::is_cache(pmem),
        inspect: |pmem, _, _| inspect::contents(pmem),
        cut_of: |_, _| None,
    }),
    plan: |_| Err(Error::new(Kind::Unsupported, "a cache cannot be served yet")),
};

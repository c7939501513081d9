//! Parts that several engines have in common, and the results of `udm inspect`.

pub mod contents;
pub(crate) mod cycle;
pub(crate) mod per_port;
pub(crate) mod room;
pub(crate) mod throttle;
pub(crate) mod wakeup;

//! writecache under exploration, over memory and over a disk.

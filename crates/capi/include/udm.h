/* libudm: Linux's device-mapper caches in a program's own process.
 *
 *     udm_open("vol", "0 2097152 pcache /dev/pmem0 /dev/sdb", "/run/mine", 0, &device);
 *     udm_queue_create(device, &queue);          // one for each thread
 *     udm_write(queue, 0, bytes, 4096, 1, 0);    // ... many, then
 *     udm_reap(queue, completions, 1, 64, -1);
 *     udm_queue_destroy(queue);
 *     udm_close(device);
 *
 * udm_connect("vhost-user:///run/udm/vol.vhost", 0, &device) uses a server instead.
 *
 * Functions that return an int return 0 or more, or a negative errno; udm_error() has a line that
 * says what was wrong. Link with -ludm.
 *
 * Made from crates/capi/src; do not edit. SPDX-License-Identifier: MIT OR Apache-2.0
 */

#ifndef UDM_H
#define UDM_H

#include <stddef.h>
#include <stdint.h>

/**
 * A flag of udm_open: format the cache device even if it may hold something else.
 */
#define UDM_FORCE_FORMAT 1

/**
 * A flag of a write, or of zeroes: complete only when it is durable.
 */
#define UDM_FUA 1

/**
 * Most bytes of one request.
 */
#define UDM_REQUEST_BYTES_MAX 33554432

/**
 * Most requests of one queue in flight.
 */
#define UDM_REQUESTS_MAX 4096

/**
 * A mapped device, in this process or of a server. Its functions may be called by any thread.
 */
typedef struct udm_device udm_device;

/**
 * Requests of one thread: the one that made it uses it, and ends it.
 */
typedef struct udm_queue udm_queue;

/**
 * A piece of memory, as `struct iovec`.
 */
typedef struct udm_iovec {
  /**
   * Its first byte.
   */
  void *base;
  /**
   * Its bytes.
   */
  size_t len;
} udm_iovec;

/**
 * What became of a request.
 */
typedef struct udm_completion {
  /**
   * As it was given with the request.
   */
  uint64_t user_data;
  /**
   * 0, or a negative errno: EIO, EINVAL (not whole blocks, or beyond the device's end), ENOSPC
   * (a write beyond the end), EROFS, EOPNOTSUPP, ETIMEDOUT.
   */
  int result;
  /**
   * 0.
   */
  uint32_t reserved;
} udm_completion;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The version of the library, as "0.1.0".
 */
const char *udm_version(void);

/**
 * One line about what failed last in this thread; never NULL. It is valid until the thread's next
 * call that fails.
 */
const char *udm_error(void);

/**
 * Opens the devices that `table` names (lines as for `dmsetup create`; paths are relative to the
 * current directory) and serves them in this process. `name` is for messages.
 *
 * `memory` is a folder that exists, for what must survive this process: when it dies, what it
 * had acknowledged is found by the next one that names the same folder, as long as the machine is
 * not restarted. With NULL, what was acknowledged and not flushed dies with the process.
 *
 * A cache device that holds nothing is formatted. One that may hold something else is refused
 * (EPERM), unless `flags` has UDM_FORCE_FORMAT.
 *
 * Returns 0 and the device, which udm_close ends; or a negative errno.
 *
 * The contract: Strings are NULL or end with a NUL; `device` is NULL or may be written.
 */
int udm_open(const char *name,
             const char *table,
             const char *memory,
             unsigned int flags,
             struct udm_device **device);

/**
 * Connects to a server of vhost-user-blk: `udm create --export`, or one of another kind. `uri` is
 * "vhost-user:///PATH". udm_reap looks at the memory that it shares with the server before it
 * sleeps, as long as that pays and at most a tenth of the time in vain; with "?poll=never" after
 * the path it sleeps immediately, with "?poll=always" never. `flags` is 0.
 *
 * Everything else is as with udm_open, but: udm_status fails (EOPNOTSUPP), a request may have at
 * most as many bytes as the server takes (31.5 MiB if it is udm; more ends with EINVAL), UDM_FUA
 * takes a flush of its own. If the server dies, udm_reap waits for the next one there, 30 s or
 * "?reconnect=SECONDS", and it does what was not answered, once more. If none comes, all requests
 * end with EIO: then end the queues and the device, and connect again.
 *
 * Returns 0 and the device, which udm_close ends; or a negative errno.
 *
 * The contract: `uri` is NULL or ends with a NUL; `device` is NULL or may be written.
 */
int udm_connect(const char *uri, unsigned int flags, struct udm_device **device);

/**
 * Ends a device: what was acknowledged is durable in its cache or on its origin. Waits up to 30
 * seconds for requests in flight, and returns a negative errno if they do not come back. The
 * device is gone in any case; requests of queues that are left fail. A server's device goes on
 * without this program. NULL is nothing to end.
 *
 * The contract: `device` is NULL, or came from udm_open or udm_connect, and nobody uses it any more.
 */
int udm_close(struct udm_device *device);

/**
 * Bytes of the device; 0 for NULL.
 *
 * The contract: `device` is NULL or open.
 */
uint64_t udm_size(const struct udm_device *device);

/**
 * The device's block in bytes, 512 or 4096 for most: requests are multiples of it, in place and
 * length, or end with EINVAL. 0 for NULL.
 *
 * The contract: `device` is NULL or open.
 */
uint32_t udm_block_bytes(const struct udm_device *device);

/**
 * The status lines of the device, as `dmsetup status` prints them, each with a newline. At most
 * `len` bytes, the last of them NUL, are written to `buffer`. Returns how many bytes the text has
 * without its NUL (if that is `len` or more, it was cut), or a negative errno.
 *
 * The contract: `device` is NULL or open; `buffer` has `len` bytes, or is NULL.
 */
int udm_status(const struct udm_device *device, char *buffer, size_t len);

/**
 * Makes a queue for the calling thread. A device has at most 255 at a time; one of a server, as
 * many as that says, and 16 at most (EBUSY).
 *
 * Returns 0 and the queue, which udm_queue_destroy ends; or a negative errno.
 *
 * The contract: `device` is NULL or open; `queue` is NULL or may be written.
 */
int udm_queue_create(const struct udm_device *device, struct udm_queue **queue);

/**
 * Ends a queue, on the thread that made it. Waits until the disks have answered what is in flight;
 * how it ended is not said, and reads that were not reaped leave their memory as it was. NULL
 * is nothing to end.
 *
 * The contract: `queue` is NULL, or came from udm_queue_create, and this is its last use.
 */
int udm_queue_destroy(struct udm_queue *queue);

/**
 * A file descriptor for a program's own loop (poll, epoll): it is readable when there may be
 * something to reap. Then call udm_reap with `min` 0 until it returns less than `max`. It belongs
 * to the queue, which reads it itself. Before the first call a request that is answered
 * immediately costs no system call, from then on it costs one.
 *
 * Returns the file descriptor, or a negative errno.
 *
 * The contract: `queue` is NULL, or a queue of this thread.
 */
int udm_queue_fd(struct udm_queue *queue);

/**
 * Reads `len` bytes at byte `offset`, both multiples of the device's block, into `buffer`.
 *
 * This and all other requests return 0, and are completed later by udm_reap with their
 * `user_data`; or a negative errno, and nothing follows: EINVAL (NULL, no bytes, not whole
 * sectors, too many bytes, unknown flags, another thread) or EBUSY (UDM_REQUESTS_MAX are in
 * flight). Memory of a request stays valid and untouched until it was reaped, or its queue
 * destroyed. A server (udm_connect) sees a request immediately if it has no other of this queue;
 * of several it may see the last seven only with the next udm_reap, unless udm_queue_fd was
 * called.
 *
 * The contract: `queue` is NULL, or a queue of this thread; `buffer` has `len` bytes.
 */
int udm_read(struct udm_queue *queue,
             uint64_t offset,
             void *buffer,
             size_t len,
             uint64_t user_data,
             unsigned int flags);

/**
 * Writes `len` bytes at byte `offset`, both multiples of the device's block, from `buffer`.
 * `flags` may be UDM_FUA.
 *
 * The contract: `queue` is NULL, or a queue of this thread; `buffer` has `len` bytes.
 */
int udm_write(struct udm_queue *queue,
              uint64_t offset,
              const void *buffer,
              size_t len,
              uint64_t user_data,
              unsigned int flags);

/**
 * As udm_read, into `count` pieces, one after the other. The array itself may be reused when this
 * returns.
 *
 * The contract: As udm_read; `pieces` has `count` pieces.
 */
int udm_readv(struct udm_queue *queue,
              uint64_t offset,
              const struct udm_iovec *pieces,
              int count,
              uint64_t user_data,
              unsigned int flags);

/**
 * As udm_write, from `count` pieces, one after the other. The array itself may be reused when this
 * returns.
 *
 * The contract: As udm_write; `pieces` has `count` pieces.
 */
int udm_writev(struct udm_queue *queue,
               uint64_t offset,
               const struct udm_iovec *pieces,
               int count,
               uint64_t user_data,
               unsigned int flags);

/**
 * Makes durable what was completed before this was called.
 *
 * The contract: `queue` is NULL, or a queue of this thread.
 */
int udm_flush(struct udm_queue *queue, uint64_t user_data, unsigned int flags);

/**
 * The range is not needed any more; it reads as zeroes afterwards.
 *
 * The contract: `queue` is NULL, or a queue of this thread.
 */
int udm_discard(struct udm_queue *queue,
                uint64_t offset,
                uint64_t len,
                uint64_t user_data,
                unsigned int flags);

/**
 * Makes a range read as zeroes. `flags` may be UDM_FUA.
 *
 * The contract: `queue` is NULL, or a queue of this thread.
 */
int udm_write_zeroes(struct udm_queue *queue,
                     uint64_t offset,
                     uint64_t len,
                     uint64_t user_data,
                     unsigned int flags);

/**
 * Takes completions: those that are there, at most `max`; if they are less than `min`, waits for
 * more, at most `timeout_ns` nanoseconds, or without an end if that is negative. The order is that
 * in which requests end.
 *
 * Returns how many there are, or a negative errno: EINVAL if `min` is more than `max`, or than
 * what is in flight.
 *
 * The contract: `queue` is NULL, or a queue of this thread; `completions` has room for `max`.
 */
int udm_reap(struct udm_queue *queue,
             struct udm_completion *completions,
             int min,
             int max,
             int64_t timeout_ns);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* UDM_H */

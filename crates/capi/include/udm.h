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
 * Functions that return an int return 0 or more, or a negative errno; udm_error() then describes
 * the error in one line. Link with -ludm.
 *
 * Generated from crates/capi/src; do not edit. SPDX-License-Identifier: MIT OR Apache-2.0
 */

#ifndef UDM_H
#define UDM_H

#include <stddef.h>
#include <stdint.h>

/**
 * A flag of udm_open: format the cache device even if it may hold other data.
 */
#define UDM_FORCE_FORMAT 1

/**
 * A flag of writes and write-zeroes requests (force unit access): complete only when durable.
 */
#define UDM_FUA 1

/**
 * Maximum bytes of one request.
 */
#define UDM_REQUEST_BYTES_MAX 33554432

/**
 * Maximum requests of one queue in flight.
 */
#define UDM_REQUESTS_MAX 4096

/**
 * A mapped device, in this process or on a server. Any thread may call its functions.
 *
 * fork: a child that is created after udm_open or udm_connect cannot use the parent's devices. In
 * the child, every function fails with EINVAL (udm_size and udm_block_bytes return 0) until it
 * calls exec; the parent is not affected. A process that forks to become a daemon must open its
 * devices afterwards.
 *
 * Threads: udm_open starts the thread udm-background, which ends in udm_close. For a cache in
 * memory it also starts udm-prefault, and for "?io=lazy" udm-write-out. These two may end shortly
 * after udm_close has returned (0.1 s, or the duration of the current write), and do not use the
 * program's memory. dlclose leaves the library loaded.
 *
 * SIGBUS: the first device with a cache in mapped memory, or on a server, installs a SIGBUS
 * handler for the process, which stays after udm_close. With it, a truncated or damaged medium
 * causes an error of the request. Other faults are passed to the previous handler. A program that
 * installs its own handler later must pass faults at unknown addresses on to the handler that
 * sigaction returned; otherwise it receives the library's faults. The library uses no other
 * signal; udm_reap continues after signals. Under a limit of file sizes, ignore SIGXFSZ.
 */
typedef struct udm_device udm_device;

/**
 * The requests of one thread: only the thread that created the queue may use and destroy it.
 */
typedef struct udm_queue udm_queue;

/**
 * A piece of memory, like `struct iovec`.
 */
typedef struct udm_iovec {
  /**
   * Its first byte.
   */
  void *base;
  /**
   * Its length in bytes.
   */
  size_t len;
} udm_iovec;

/**
 * The result of a request.
 */
typedef struct udm_completion {
  /**
   * The value that was passed with the request.
   */
  uint64_t user_data;
  /**
   * 0, or a negative errno: EIO, EINVAL (not whole blocks, or beyond the device's end), ENOSPC
   * (a write beyond the end), EROFS, EOPNOTSUPP, ETIMEDOUT.
   */
  int result;
  /**
   * Always 0.
   */
  uint32_t reserved;
} udm_completion;

#ifdef __cplusplus
extern "C" {
#endif /* __cplusplus */

/**
 * Returns the version of the library, such as "0.1.0".
 */
const char *udm_version(void);

/**
 * Returns one line about this thread's last error; never NULL. It is valid until the thread's next
 * call that fails.
 */
const char *udm_error(void);

/**
 * Opens the devices of `table` (lines as for `dmsetup create`; paths are relative to the current
 * directory) and serves them in this process. `name` is used in messages.
 *
 * `memory` is an existing folder for data that must survive this process. If the process dies, the
 * next one that names the same folder finds all acknowledged writes, as long as the machine was
 * not restarted. With NULL, acknowledged writes without a flush are lost with the process.
 *
 * An empty cache device is formatted. A device that may hold other data is refused (EPERM), unless
 * `flags` has UDM_FORCE_FORMAT.
 *
 * Returns 0 and the device, to be closed with udm_close; or a negative errno.
 *
 * The contract: Strings are NULL or end with a NUL; `device` is NULL or writable.
 */
int udm_open(const char *name,
             const char *table,
             const char *memory,
             unsigned int flags,
             struct udm_device **device);

/**
 * Connects to a vhost-user-blk server: `udm create --export`, or another implementation. `uri` is
 * "vhost-user:///PATH". Before udm_reap sleeps, it polls the memory that it shares with the
 * server, as long as that pays off; at most a tenth of the time is wasted on polling. With
 * "?poll=never" after the path it sleeps immediately, with "?poll=always" never. `flags` is 0.
 *
 * The differences to udm_open are: udm_status fails (EOPNOTSUPP). The server sets the maximum size
 * of a request (31.5 MiB for udm; larger ones end with EINVAL). UDM_FUA takes an additional flush.
 * If the server dies, udm_reap waits for the next server at this address, for 30 s or
 * "?reconnect=SECONDS", and unanswered requests are sent to it again. If no server appears in
 * time, all requests end with EIO: destroy the queues, close the device, and connect again.
 *
 * Returns 0 and the device, to be closed with udm_close; or a negative errno.
 *
 * The contract: `uri` is NULL or ends with a NUL; `device` is NULL or writable.
 */
int udm_connect(const char *uri, unsigned int flags, struct udm_device **device);

/**
 * Closes a device: all acknowledged data is then durable, in its cache or on its origin. Waits up
 * to 30 seconds for requests in flight, and returns a negative errno if they do not end in time.
 * The device is closed in any case, and requests of its remaining queues fail. A server's device
 * stays open on the server. NULL is ignored.
 *
 * The contract: `device` is NULL, or was returned by udm_open or udm_connect, and is not used any more.
 */
int udm_close(struct udm_device *device);

/**
 * Returns the size of the device in bytes; 0 for NULL.
 *
 * The contract: `device` is NULL or open.
 */
uint64_t udm_size(const struct udm_device *device);

/**
 * Returns the device's block size in bytes, usually 512 or 4096. Offset and length of a request
 * must be multiples of it; otherwise the request ends with EINVAL. Returns 0 for NULL.
 *
 * The contract: `device` is NULL or open.
 */
uint32_t udm_block_bytes(const struct udm_device *device);

/**
 * Writes the status lines of the device to `buffer`, in the format of `dmsetup status`, each with
 * a newline. At most `len` bytes are written, including the final NUL. Returns the length of the
 * whole text without the NUL (`len` or more: the text was truncated), or a negative errno.
 *
 * The contract: `device` is NULL or open; `buffer` has `len` bytes, or is NULL.
 */
int udm_status(const struct udm_device *device, char *buffer, size_t len);

/**
 * Creates a queue for the calling thread. A device has at most 255 queues at a time; a server's
 * device has as many as the server allows, at most 16 (EBUSY).
 *
 * Returns 0 and the queue, to be destroyed with udm_queue_destroy; or a negative errno.
 *
 * The contract: `device` is NULL or open; `queue` is NULL or writable.
 */
int udm_queue_create(const struct udm_device *device, struct udm_queue **queue);

/**
 * Destroys a queue, on the thread that created it. Waits until the disks have answered the
 * requests in flight, whose results are dropped; reads that were not reaped leave their memory
 * unchanged. NULL is ignored.
 *
 * The contract: `queue` is NULL, or was returned by udm_queue_create, and this is its last use.
 */
int udm_queue_destroy(struct udm_queue *queue);

/**
 * Returns a file descriptor for a program's own loop (poll, epoll): it is readable when there may
 * be completions to reap. Then call udm_reap with `min` 0 until it returns less than `max`. The
 * descriptor belongs to the queue, which reads it itself. Before the first call of this function,
 * a request that is answered immediately costs no system call; afterwards it costs one.
 *
 * Returns a negative errno on failure.
 *
 * The contract: `queue` is NULL, or a queue of this thread.
 */
int udm_queue_fd(struct udm_queue *queue);

/**
 * Reads `len` bytes at byte `offset` into `buffer`. Offset and length must be multiples of the
 * device's block size.
 *
 * This and all other requests return 0 or a negative errno. After 0, udm_reap later returns the
 * completion with the request's `user_data`. After an error, no completion follows: EINVAL (NULL,
 * no bytes, not whole sectors, too many bytes, unknown flags, wrong thread) or EBUSY
 * (UDM_REQUESTS_MAX are in flight). A request's memory must stay valid and untouched until the
 * request was reaped or its queue was destroyed. A server (udm_connect) sees a request
 * immediately if no other request of this queue is in flight. It may see the last seven of
 * several requests only with the next udm_reap, unless udm_queue_fd was called.
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
 * Writes `len` bytes from `buffer` to byte `offset`. Offset and length must be multiples of the
 * device's block size. `flags` may be UDM_FUA.
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
 * Like udm_read, into `count` pieces in order. The array itself may be reused after the return.
 *
 * The contract: As for udm_read; `pieces` has `count` pieces.
 */
int udm_readv(struct udm_queue *queue,
              uint64_t offset,
              const struct udm_iovec *pieces,
              int count,
              uint64_t user_data,
              unsigned int flags);

/**
 * Like udm_write, from `count` pieces in order. The array itself may be reused after the return.
 *
 * The contract: As for udm_write; `pieces` has `count` pieces.
 */
int udm_writev(struct udm_queue *queue,
               uint64_t offset,
               const struct udm_iovec *pieces,
               int count,
               uint64_t user_data,
               unsigned int flags);

/**
 * Flush: makes all requests durable that were completed before this call.
 *
 * The contract: `queue` is NULL, or a queue of this thread.
 */
int udm_flush(struct udm_queue *queue, uint64_t user_data, unsigned int flags);

/**
 * Discards a range that is not needed any more; it reads as zeroes afterwards.
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
 * Takes at most `max` completions, in the order in which requests end. If fewer than `min` are
 * ready, it waits for more, at most `timeout_ns` nanoseconds, or without limit if that is
 * negative.
 *
 * Returns their number, or a negative errno: EINVAL if `min` is more than `max`, or more than the
 * requests in flight.
 *
 * The contract: `queue` is NULL, or a queue of this thread; `completions` has space for `max`.
 */
int udm_reap(struct udm_queue *queue,
             struct udm_completion *completions,
             int min,
             int max,
             int64_t timeout_ns);

#ifdef __cplusplus
}  /* extern "C" */
#endif  /* __cplusplus */

#endif  /* UDM_H */

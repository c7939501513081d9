/* Copies a file to a device, or a device to a file, with many requests in flight.
 *
 *     copy FILE TABLE      copy --from TABLE FILE
 *
 * TABLE may also be the address of a server: vhost-user:///run/udm/vol.vhost
 *
 * cc copy.c $(pkg-config --cflags --libs udm) -o copy
 */

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "udm.h"

enum { DEPTH = 32, CHUNK = 128 * 1024 };

static char chunks[DEPTH][CHUNK];

static void must(int result, const char *what) {
	if (result < 0) {
		fprintf(stderr, "%s: %s: %s\n", what, strerror(-result), udm_error());
		exit(1);
	}
}

/* Bytes of the chunk at `at`. */
static size_t chunk_at(uint64_t at, uint64_t size) {
	return size - at < CHUNK ? (size_t)(size - at) : CHUNK;
}

/* Copies `size` bytes between `file` and the queue's device. A request's user_data is its chunk. */
static void copy(int file, udm_queue *queue, uint64_t size, int from_device) {
	uint64_t at[DEPTH], next = 0, in_flight = 0;
	int idle[DEPTH], idle_count = 0;
	for (int i = 0; i < DEPTH; i++)
		idle[idle_count++] = i;
	while (next < size || in_flight > 0) {
		while (next < size && idle_count > 0) {
			int i = idle[--idle_count];
			size_t len = chunk_at(next, size);
			at[i] = next;
			if (from_device) {
				must(udm_read(queue, next, chunks[i], len, i, 0), "reading");
			} else {
				if (pread(file, chunks[i], len, next) != (ssize_t)len) {
					perror("reading the file");
					exit(1);
				}
				must(udm_write(queue, next, chunks[i], len, i, 0), "writing");
			}
			next += len;
			in_flight++;
		}
		udm_completion done[DEPTH];
		int count = udm_reap(queue, done, 1, DEPTH, -1);
		must(count, "waiting");
		for (int n = 0; n < count; n++) {
			int i = (int)done[n].user_data;
			must(done[n].result, "a request");
			size_t len = chunk_at(at[i], size);
			if (from_device && pwrite(file, chunks[i], len, at[i]) != (ssize_t)len) {
				perror("writing the file");
				exit(1);
			}
			idle[idle_count++] = i;
			in_flight--;
		}
	}
}

int main(int argc, char **argv) {
	int from_device = argc == 4 && strcmp(argv[1], "--from") == 0;
	if (argc != 3 && !from_device) {
		fprintf(stderr, "usage: copy FILE TABLE | copy --from TABLE FILE\n");
		return 2;
	}
	const char *path = from_device ? argv[3] : argv[1];
	const char *table = argv[2];
	udm_device *device;
	udm_queue *queue;
	/* All data is flushed before the end, so no memory must survive this process. */
	if (strncmp(table, "vhost-user:", 11) == 0)
		must(udm_connect(table, 0, &device), "connecting to the server");
	else
		must(udm_open("copy", table, NULL, 0, &device), "opening the device");
	must(udm_queue_create(device, &queue), "making a queue");
	int file = open(path, from_device ? O_WRONLY | O_CREAT | O_TRUNC : O_RDONLY, 0644);
	if (file < 0) {
		perror(path);
		return 1;
	}
	uint64_t size = udm_size(device);
	if (!from_device) {
		off_t bytes = lseek(file, 0, SEEK_END);
		if (bytes < 0 || (uint64_t)bytes > size || bytes % udm_block_bytes(device) != 0) {
			fprintf(stderr, "%s: it must have whole blocks, and fit the device\n", path);
			return 1;
		}
		size = (uint64_t)bytes;
	}
	copy(file, queue, size, from_device);
	udm_completion flushed;
	must(udm_flush(queue, 0, 0), "flushing");
	must(udm_reap(queue, &flushed, 1, 1, -1), "waiting");
	must(flushed.result, "the flush");
	must(udm_queue_destroy(queue), "ending the queue");
	must(udm_close(device), "closing the device");
	printf("%llu bytes\n", (unsigned long long)size);
	return close(file) == 0 ? 0 : 1;
}

/* A server that dies while a program uses it: the program gets errors, and continues. */

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "udm.h"

#define CHECK(condition)                                                            \
	do {                                                                        \
		if (!(condition)) {                                                 \
			fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, \
				udm_error());                                       \
			exit(1);                                                    \
		}                                                                   \
	} while (0)

enum { DEPTH = 1000 };

static char bytes[DEPTH][512];

int main(int argc, char **argv) {
	static udm_completion done[DEPTH];
	udm_device *device;
	udm_queue *queue;
	char text[8];
	CHECK(argc == 2);
	CHECK(udm_connect(argv[1], 0, &device) == 0);
	CHECK(udm_size(device) == 8 << 20 && udm_block_bytes(device) == 512);
	CHECK(udm_status(device, text, sizeof text) == -EOPNOTSUPP);
	CHECK(udm_queue_create(device, &queue) == 0);
	/* More requests than the ring holds, with and without waiting for them. */
	for (int i = 0; i < DEPTH; i++) {
		memset(bytes[i], i, 512);
		CHECK(udm_write(queue, i * 512, bytes[i], 512, i, i % 9 == 0 ? UDM_FUA : 0) == 0);
	}
	int count = udm_reap(queue, done, DEPTH, DEPTH, -1);
	CHECK(count == DEPTH);
	for (int i = 0; i < count; i++)
		CHECK(done[i].result == 0);
	struct pollfd file = {udm_queue_fd(queue), POLLIN, 0};
	CHECK(file.fd >= 0);
	CHECK(udm_read(queue, 513 * 512, bytes[0], 512, 77, 0) == 0);
	/* It may be readable without an answer, but not forever. */
	do {
		CHECK(poll(&file, 1, 10000) == 1);
		count = udm_reap(queue, done, 0, 8, 0);
	} while (count == 0);
	CHECK(count == 1 && done[0].user_data == 77);
	CHECK(bytes[0][0] == (char)513 && bytes[0][511] == (char)513);
	CHECK(udm_read(queue, 8 << 20, bytes[0], 512, 78, 0) == 0);
	CHECK(udm_reap(queue, done, 1, 8, -1) == 1 && done[0].result == -EINVAL);
	puts("ready");
	fflush(stdout);
	/* Until the server dies: then an error, not an endless wait. */
	int result = 0;
	while (result == 0) {
		result = udm_flush(queue, 1, 0);
		if (result == 0 && udm_reap(queue, done, 1, 8, -1) == 1)
			result = done[0].result;
	}
	CHECK(result == -EIO);
	CHECK(udm_write(queue, 0, bytes[0], 512, 1, 0) == -EIO);
	CHECK(strstr(udm_error(), "it disconnected") != NULL);
	udm_queue *other;
	CHECK(udm_queue_create(device, &other) == -EIO);
	CHECK(udm_queue_destroy(queue) == 0 && udm_close(device) == 0);
	puts("it is gone");
	return 0;
}

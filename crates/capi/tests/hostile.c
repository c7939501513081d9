/* Mistakes of a program: each returns an errno and a line of text, and never crashes. */

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "udm.h"

#define CHECK(condition)                                                            \
	do {                                                                        \
		if (!(condition)) {                                                 \
			fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, \
				udm_error());                                       \
			exit(1);                                                    \
		}                                                                   \
	} while (0)

static char bytes[1 << 20];

static void *of_another_thread(void *queue) {
	udm_completion done;
	CHECK(udm_read(queue, 0, bytes, 512, 0, 0) == -EINVAL);
	CHECK(strstr(udm_error(), "the thread that made it") != NULL);
	CHECK(udm_reap(queue, &done, 0, 1, 0) == -EINVAL);
	CHECK(udm_queue_fd(queue) == -EINVAL);
	CHECK(udm_queue_destroy(queue) == -EINVAL);
	return NULL;
}

static void without_a_device(const char *table) {
	udm_device *device = NULL;
	udm_queue *queue = NULL;
	CHECK(strcmp(udm_error(), "") == 0);
	CHECK(udm_open(NULL, table, NULL, 0, &device) == -EINVAL);
	CHECK(strstr(udm_error(), "the name is NULL") != NULL);
	CHECK(udm_open("v", NULL, NULL, 0, &device) == -EINVAL);
	CHECK(udm_open("v", table, NULL, 0, NULL) == -EINVAL);
	CHECK(udm_open("v", table, NULL, 1u << 31, &device) == -EINVAL);
	CHECK(udm_open("v", "\xff", NULL, 0, &device) == -EINVAL);
	CHECK(udm_open("v", "0 8 nothing", NULL, 0, &device) < 0);
	CHECK(strlen(udm_error()) > 0);
	CHECK(udm_open("v", "0 8 linear /no/such/file 0", NULL, 0, &device) == -ENOENT);
	CHECK(device == NULL);
	CHECK(udm_connect(NULL, 0, &device) == -EINVAL);
	CHECK(strstr(udm_error(), "the URI is NULL") != NULL);
	CHECK(udm_connect("vhost-user:///tmp/x", 0, NULL) == -EINVAL);
	CHECK(udm_connect("vhost-user:///tmp/x", 1, &device) == -EINVAL);
	CHECK(udm_connect("vhost-user:///tmp/x?poll=often", 0, &device) == -EINVAL);
	CHECK(strstr(udm_error(), "auto, never or always") != NULL);
	CHECK(udm_connect("nbd+unix:///tmp/x", 0, &device) == -EINVAL);
	CHECK(udm_connect("vhost-user:///no/such/socket", 0, &device) == -ENOENT);
	CHECK(strstr(udm_error(), "/no/such/socket") != NULL);
	CHECK(device == NULL);
	CHECK(udm_size(NULL) == 0 && udm_block_bytes(NULL) == 0);
	CHECK(udm_status(NULL, bytes, 8) == -EINVAL);
	CHECK(udm_queue_create(NULL, &queue) == -EINVAL);
	CHECK(udm_read(NULL, 0, bytes, 512, 0, 0) == -EINVAL);
	CHECK(udm_queue_destroy(NULL) == 0 && udm_close(NULL) == 0);
}

static void requests(udm_device *device, udm_queue *queue) {
	udm_completion done[8];
	uint64_t size = udm_size(device);
	udm_iovec pieces[2] = {{bytes, 512}, {NULL, 512}};
	CHECK(udm_read(queue, 1, bytes, 512, 0, 0) == -EINVAL);
	CHECK(udm_read(queue, 0, bytes, 100, 0, 0) == -EINVAL);
	CHECK(udm_read(queue, 0, bytes, 0, 0, 0) == -EINVAL);
	CHECK(udm_read(queue, 0, NULL, 512, 0, 0) == -EINVAL);
	CHECK(udm_read(queue, 0, bytes, 512, 0, UDM_FUA) == -EINVAL);
	CHECK(udm_read(queue, UINT64_MAX - 511, bytes, 512, 0, 0) == -EINVAL);
	CHECK(udm_write(queue, 0, bytes, SIZE_MAX & ~(size_t)511, 0, 0) == -EINVAL);
	CHECK(udm_write(queue, 0, bytes, UDM_REQUEST_BYTES_MAX + 512, 0, 0) == -EINVAL);
	CHECK(udm_writev(queue, 0, pieces, 2, 0, 0) == -EINVAL);
	CHECK(udm_writev(queue, 0, pieces, -1, 0, 0) == -EINVAL);
	CHECK(udm_writev(queue, 0, NULL, 1, 0, 0) == -EINVAL);
	CHECK(udm_discard(queue, 0, 0, 0, 0) == -EINVAL);
	CHECK(udm_write_zeroes(queue, 0, 512, 0, 8) == -EINVAL);
	CHECK(udm_reap(queue, done, 0, 8, -1) == 0);
	CHECK(udm_reap(queue, done, 1, 8, -1) == -EINVAL);
	CHECK(udm_reap(queue, done, 2, 1, -1) == -EINVAL);
	CHECK(udm_reap(queue, NULL, 0, 1, 0) == -EINVAL);

	/* Whole sectors beyond the device's end: the request itself ends with an error. */
	CHECK(udm_write(queue, size, bytes, 512, 77, 0) == 0);
	CHECK(udm_reap(queue, done, 1, 8, -1) == 1);
	CHECK(done[0].user_data == 77 && done[0].result == -ENOSPC);
	CHECK(udm_read(queue, size - 512, bytes, 1024, 78, 0) == 0);
	CHECK(udm_reap(queue, done, 1, 8, -1) == 1);
	CHECK(done[0].user_data == 78 && done[0].result == -EINVAL);

	/* At most the maximum in flight, and all complete. */
	for (unsigned i = 0; i < UDM_REQUESTS_MAX; i++)
		CHECK(udm_flush(queue, i, 0) == 0);
	CHECK(udm_flush(queue, 0, 0) == -EBUSY);
	CHECK(udm_reap(queue, done, UDM_REQUESTS_MAX + 1, UDM_REQUESTS_MAX + 1, 0) == -EINVAL);
	for (unsigned left = UDM_REQUESTS_MAX; left > 0;) {
		int count = udm_reap(queue, done, 1, 8, -1);
		CHECK(count > 0 && (unsigned)count <= left);
		left -= count;
	}
}

/* A loop of the program's own: the descriptor is readable when there are completions. */
static void own_loop(udm_queue *queue) {
	struct pollfd wait = {udm_queue_fd(queue), POLLIN, 0};
	udm_completion done[2];
	udm_iovec pieces[2] = {{bytes, 1024}, {bytes + 4096, 3072}};
	CHECK(wait.fd >= 0 && wait.fd == udm_queue_fd(queue));
	CHECK(poll(&wait, 1, 0) == 0);
	for (int round = 0; round < 100; round++) {
		memset(bytes, round, 8192);
		CHECK(udm_writev(queue, 4096, pieces, 2, round, round % 2 ? UDM_FUA : 0) == 0);
		CHECK(poll(&wait, 1, 10000) == 1);
		int count;
		while ((count = udm_reap(queue, done, 0, 2, 0)) == 0)
			CHECK(poll(&wait, 1, 10000) == 1);
		CHECK(count == 1 && done[0].result == 0 && done[0].user_data == (uint64_t)round);
		memset(bytes, 255, 8192);
		CHECK(udm_readv(queue, 4096, pieces, 2, round, 0) == 0);
		CHECK(udm_reap(queue, done, 1, 2, 10000000000) == 1 && done[0].result == 0);
		CHECK(bytes[0] == round && bytes[1023] == round && bytes[1024] == (char)255);
		CHECK(bytes[4096] == round && bytes[7167] == round && bytes[7168] == (char)255);
	}
	CHECK(udm_reap(queue, done, 0, 2, 0) == 0);
	CHECK(poll(&wait, 1, 0) == 0);
}

int main(int argc, char **argv) {
	udm_device *device;
	udm_queue *queue, *second;
	udm_completion done;
	pthread_t other;
	CHECK(argc == 2);
	without_a_device(argv[1]);
	CHECK(udm_open("v", argv[1], NULL, 0, &device) == 0);
	CHECK(udm_block_bytes(device) >= 512);
	int len = udm_status(device, NULL, 0);
	CHECK(len > 0 && udm_status(device, bytes, 5) == len && strlen(bytes) == 4);
	CHECK(udm_status(device, bytes, len + 1) == len && bytes[len - 1] == '\n');
	CHECK(udm_queue_create(device, &queue) == 0);
	CHECK(pthread_create(&other, NULL, of_another_thread, queue) == 0);
	CHECK(pthread_join(other, NULL) == 0);
	requests(device, queue);
	own_loop(queue);

	/* A queue may have requests in flight when its device is closed, and outlive it. */
	CHECK(udm_queue_create(device, &second) == 0);
	CHECK(udm_write(second, 0, bytes, sizeof bytes, 0, 0) == 0);
	CHECK(udm_queue_destroy(second) == 0);
	CHECK(udm_close(device) == 0);
	CHECK(udm_read(queue, 0, bytes, 512, 5, 0) == 0);
	CHECK(udm_reap(queue, &done, 1, 1, -1) == 1 && done.user_data == 5 && done.result < 0);
	CHECK(udm_queue_destroy(queue) == 0);
	puts("all is refused that should be");
	return 0;
}

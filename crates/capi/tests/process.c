/* The library's effects on the program's process: its children, signals and threads.
 *   process TABLE CACHE-FILE */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "udm.h"

#define CHECK(condition)                                                            \
	do {                                                                        \
		if (!(condition)) {                                                 \
			fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, \
				udm_error());                                       \
			_exit(1);                                                   \
		}                                                                   \
	} while (0)

static char bytes[4096];
static sigjmp_buf jump;
static volatile sig_atomic_t faults;

static void own_handler(int signal) {
	(void)signal;
	faults++;
	siglongjmp(jump, 1);
}

static int done(udm_queue *queue) {
	udm_completion completion;
	CHECK(udm_reap(queue, &completion, 1, 1, 30000000000) == 1);
	return completion.result;
}

/* All functions fail in a child, and its parent is not affected. */
static void forks(const char *table, udm_device *device, udm_queue *queue) {
	udm_device *other = NULL;
	udm_queue *more = NULL;
	udm_completion completion;
	int status;
	pid_t child = fork();
	if (child == 0) {
		CHECK(udm_write(queue, 0, bytes, 4096, 9, 0) == -EINVAL);
		CHECK(strstr(udm_error(), "devices stay with the parent") != NULL);
		CHECK(udm_read(queue, 0, bytes, 4096, 9, 0) == -EINVAL);
		CHECK(udm_flush(queue, 9, 0) == -EINVAL);
		CHECK(udm_reap(queue, &completion, 0, 1, -1) == -EINVAL);
		CHECK(udm_queue_fd(queue) == -EINVAL);
		CHECK(udm_queue_create(device, &more) == -EINVAL);
		CHECK(udm_queue_destroy(queue) == -EINVAL);
		CHECK(udm_status(device, bytes, 8) == -EINVAL);
		CHECK(udm_size(device) == 0 && udm_block_bytes(device) == 0);
		CHECK(udm_open("again", table, NULL, 0, &other) == -EINVAL);
		CHECK(udm_close(device) == -EINVAL);
		_exit(0);
	}
	CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
	CHECK(udm_size(device) == 16 << 20);
	memset(bytes, 7, sizeof bytes);
	CHECK(udm_write(queue, 8192, bytes, 4096, 1, 0) == 0 && done(queue) == 0);
	memset(bytes, 0, sizeof bytes);
	CHECK(udm_read(queue, 8192, bytes, 4096, 1, 0) == 0 && done(queue) == 0);
	CHECK(bytes[0] == 7 && bytes[4095] == 7);
}

/* The program handles faults in its own memory. */
static void faults_of_its_own(void) {
	int file = memfd_create("own", 0);
	volatile char *memory;
	sig_atomic_t before = faults;
	CHECK(file >= 0 && ftruncate(file, 4096) == 0);
	memory = mmap(NULL, 4096, PROT_READ, MAP_SHARED, file, 0);
	CHECK(memory != MAP_FAILED && ftruncate(file, 0) == 0);
	if (sigsetjmp(jump, 1) == 0) {
		CHECK(memory[0] == 1);
		CHECK(0);
	}
	CHECK(faults == before + 1);
	close(file);
}

/* Number of this process's threads other than its first one. */
static int threads(void) {
	DIR *folder = opendir("/proc/self/task");
	int count = 0;
	CHECK(folder != NULL);
	while (readdir(folder) != NULL) {
		count++;
	}
	closedir(folder);
	return count - 3;
}

int main(int argc, char **argv) {
	struct sigaction own = {.sa_handler = own_handler}, before[65], after;
	udm_device *device;
	udm_queue *queue;
	int number, failed = 0;
	CHECK(argc == 3);
	CHECK(sigaction(SIGBUS, &own, NULL) == 0);
	for (number = 1; number < 65; number++) {
		sigaction(number, NULL, &before[number]);
	}
	CHECK(udm_open("process", argv[1], NULL, 0, &device) == 0);
	CHECK(udm_queue_create(device, &queue) == 0);
	for (number = 1; number < 65; number++) {
		if (number != SIGBUS && sigaction(number, NULL, &after) == 0) {
			CHECK(after.sa_handler == before[number].sa_handler);
		}
	}
	forks(argv[1], device, queue);
	/* The library's handler still works after the program's has jumped out of a signal. */
	faults_of_its_own();
	faults_of_its_own();
	CHECK(truncate(argv[2], 0) == 0);
	for (number = 0; number < 256 && failed == 0; number++) {
		CHECK(udm_write(queue, 4096 * (uint64_t)number, bytes, 4096, 1, 0) == 0);
		failed = done(queue);
	}
	CHECK(failed == -EIO && faults == 2);
	CHECK(udm_queue_destroy(queue) == 0);
	udm_close(device);
	for (number = 0; threads() > 0; number++) {
		CHECK(number < 6000);
		usleep(10000);
	}
	faults_of_its_own();
	CHECK(faults == 3);
	puts("the process keeps what is its own");
	return 0;
}

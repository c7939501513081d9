/* A log: records of one block, each durable before the next one is started. After this program
 * was killed, its next run finds every acknowledged record.
 *
 *     log TABLE MEMORY write COUNT     prints the number of each record that is durable
 *     log TABLE MEMORY check           prints how many records there are
 *
 * cc log.c $(pkg-config --cflags --libs udm) -o log
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "udm.h"

enum { RECORD = 4096 };

static void must(int result, const char *what) {
	if (result < 0) {
		fprintf(stderr, "%s: %s: %s\n", what, strerror(-result), udm_error());
		exit(1);
	}
}

/* The record of this number: a mark, the number, and bytes derived from it. */
static void make(unsigned char *record, uint64_t number) {
	memset(record, (int)(number * 37 + 1), RECORD);
	memcpy(record, "LOG1", 4);
	memcpy(record + 8, &number, sizeof number);
}

/* Waits for the one request in flight. */
static void await(udm_queue *queue, const char *what) {
	udm_completion done;
	must(udm_reap(queue, &done, 1, 1, -1), "waiting");
	must(done.result, what);
}

int main(int argc, char **argv) {
	if (argc < 4) {
		fprintf(stderr, "usage: log TABLE MEMORY write COUNT | log TABLE MEMORY check\n");
		return 2;
	}
	udm_device *device;
	udm_queue *queue;
	must(udm_open("log", argv[1], argv[2], 0, &device), "opening the device");
	must(udm_queue_create(device, &queue), "making a queue");
	uint64_t records = udm_size(device) / RECORD, number = 0;
	unsigned char record[RECORD], found[RECORD];
	if (strcmp(argv[3], "write") == 0 && argc == 5) {
		uint64_t count = strtoull(argv[4], NULL, 10);
		for (; number < count && number < records; number++) {
			make(record, number);
			must(udm_write(queue, number * RECORD, record, RECORD, number, UDM_FUA), "writing");
			await(queue, "a record");
			printf("%llu\n", (unsigned long long)number);
			fflush(stdout);
		}
	} else {
		for (; number < records; number++) {
			make(record, number);
			must(udm_read(queue, number * RECORD, found, RECORD, number, 0), "reading");
			await(queue, "a record");
			if (memcmp(record, found, RECORD) != 0)
				break;
		}
		printf("%llu\n", (unsigned long long)number);
	}
	must(udm_queue_destroy(queue), "ending the queue");
	must(udm_close(device), "closing the device");
	return 0;
}

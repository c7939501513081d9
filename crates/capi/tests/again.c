/* A program under load whose server is killed repeatedly: each request is answered once and
 * without an error, and the data is right. It runs until its standard input ends; with a second
 * argument it sleeps in a loop of its own. */

#include <poll.h>
#include <stdint.h>
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

enum { DEPTH = 24, BLOCK = 4096, WORDS = BLOCK / 4, BLOCKS = 48 * 1024 / 4, FLUSH = BLOCKS };

/* A request writes or reads a block whose number modulo the depth is the request's number. */
static struct {
	uint32_t words[WORDS];
	int block, is_read, is_busy;
} slots[DEPTH];
static uint32_t versions[BLOCKS];
static udm_queue *queue;
static uint64_t requests;

static uint32_t word_of(int block, uint32_t version, int at) {
	return version == 0 ? 0 : (uint32_t)block * 2654435761u ^ version << 12 ^ (uint32_t)at;
}

static void begin(int slot) {
	int block = rand() % (BLOCKS / DEPTH) * DEPTH + slot;
	uint64_t at = (uint64_t)block * BLOCK;
	slots[slot].is_busy = 1;
	requests++;
	if (rand() % 50 == 0) {
		slots[slot].block = FLUSH;
		CHECK(udm_flush(queue, slot, 0) == 0);
		return;
	}
	slots[slot].block = block;
	slots[slot].is_read = rand() % 3 == 0;
	if (slots[slot].is_read) {
		memset(slots[slot].words, 0xee, BLOCK);
		CHECK(udm_read(queue, at, slots[slot].words, BLOCK, slot, 0) == 0);
		return;
	}
	versions[block]++;
	for (int nth = 0; nth < WORDS; nth++)
		slots[slot].words[nth] = word_of(block, versions[block], nth);
	unsigned flags = rand() % 9 == 0 ? UDM_FUA : 0;
	CHECK(udm_write(queue, at, slots[slot].words, BLOCK, slot, flags) == 0);
}

static void check(const uint32_t *words, int block) {
	for (int nth = 0; nth < WORDS; nth++)
		if (words[nth] != word_of(block, versions[block], nth)) {
			fprintf(stderr, "block %d, version %u, word %d: %x\n", block,
				versions[block], nth, words[nth]);
			exit(1);
		}
}

static void end(const udm_completion *done) {
	int slot = done->user_data;
	CHECK(slot < DEPTH && slots[slot].is_busy);
	if (done->result != 0)
		fprintf(stderr, "request %d of block %d\n", slot, slots[slot].block);
	CHECK(done->result == 0);
	slots[slot].is_busy = 0;
	if (slots[slot].block != FLUSH && slots[slot].is_read)
		check(slots[slot].words, slots[slot].block);
}

static int is_over(void) {
	struct pollfd input = {STDIN_FILENO, POLLIN, 0};
	return poll(&input, 1, 0) == 1;
}

int main(int argc, char **argv) {
	static uint32_t words[WORDS];
	udm_completion done[DEPTH];
	udm_device *device;
	CHECK(argc >= 2);
	CHECK(udm_connect(argv[1], 0, &device) == 0);
	CHECK(udm_size(device) >= (uint64_t)BLOCKS * BLOCK);
	CHECK(udm_queue_create(device, &queue) == 0);
	/* From here on the server may be killed; the first connection is tried only once. */
	puts("connected");
	fflush(stdout);
	int has_loop = argc > 2, in_flight = 0, goes_on = 1;
	for (int turn = 0; goes_on || in_flight > 0; turn++) {
		if (turn % 64 == 0 && is_over())
			goes_on = 0;
		for (int slot = 0; goes_on && slot < DEPTH; slot++)
			if (!slots[slot].is_busy) {
				begin(slot);
				in_flight++;
			}
		if (in_flight == 0)
			break;
		struct pollfd file = {has_loop ? udm_queue_fd(queue) : -1, POLLIN, 0};
		if (has_loop)
			CHECK(poll(&file, 1, 300000) == 1);
		int count = udm_reap(queue, done, has_loop ? 0 : 1, DEPTH, 300000000000);
		CHECK(count >= (has_loop ? 0 : 1));
		for (int nth = 0; nth < count; nth++)
			end(&done[nth]);
		in_flight -= count;
	}
	for (int block = 0; block < BLOCKS; block++) {
		CHECK(udm_read(queue, (uint64_t)block * BLOCK, words, BLOCK, 99, 0) == 0);
		CHECK(udm_reap(queue, done, 1, 1, -1) == 1 && done[0].result == 0);
		check(words, block);
	}
	CHECK(udm_queue_destroy(queue) == 0 && udm_close(device) == 0);
	printf("%llu\n", (unsigned long long)requests);
	return 0;
}

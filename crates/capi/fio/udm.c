/* An I/O engine for fio: requests to a mapped device in fio's own process, through libudm.
 *
 *     fio --name=j --ioengine=external:./udm-fio.so --rw=randwrite --bs=4k --size=1g \
 *         --udm_table='0 2097152 pcache /dev/pmem0 /dev/sdb' --udm_memory=/run/mine
 *
 * Jobs are threads, because they share the device: jobs with the same table use one device. A sync
 * of fio (fsync=, fdatasync=) is a flush, sync=1 makes each write FUA, a trim is a discard.
 *
 * Built against the headers of the fio that will load it: `make fio-engine`.
 */

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "fio.h"
#include "optgroup.h"

#include "udm.h"

/* A device, and its number of jobs. */
struct shared {
	struct shared *next;
	char *table;
	udm_device *device;
	unsigned int jobs;
};

/* The state of one job. */
struct job {
	struct shared *shared;
	udm_queue *queue;
	/* Reaped completions that fio has not taken yet. */
	udm_completion *events;
	unsigned int depth;
};

struct options {
	void *pad; /* fio treats an offset of 0 as no option */
	char *table;
	char *memory;
	unsigned int format;
};

static struct fio_option options[] = {
	{
		.name = "udm_table",
		.lname = "Table of the udm device",
		.type = FIO_OPT_STR_STORE,
		.off1 = offsetof(struct options, table),
		.help = "Lines as for dmsetup create",
		.category = FIO_OPT_C_ENGINE,
		.group = FIO_OPT_G_INVALID,
	},
	{
		.name = "udm_memory",
		.lname = "Folder for memory that survives",
		.type = FIO_OPT_STR_STORE,
		.off1 = offsetof(struct options, memory),
		.help = "What is acknowledged and not flushed survives fio's death by files in it",
		.category = FIO_OPT_C_ENGINE,
		.group = FIO_OPT_G_INVALID,
	},
	{
		.name = "udm_format",
		.lname = "Format what may hold something else",
		.type = FIO_OPT_STR_SET,
		.off1 = offsetof(struct options, format),
		.help = "Format the cache device even if it may hold something else",
		.category = FIO_OPT_C_ENGINE,
		.group = FIO_OPT_G_INVALID,
	},
	{ .name = NULL },
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct shared *devices;

/* The device of this table, opened by the first job. */
static struct shared *take(struct options *o)
{
	struct shared *found;
	int error;

	pthread_mutex_lock(&lock);
	for (found = devices; found; found = found->next)
		if (!strcmp(found->table, o->table))
			break;
	if (!found) {
		found = calloc(1, sizeof(*found));
		found->table = strdup(o->table);
		error = udm_open("fio", o->table, o->memory, o->format ? UDM_FORCE_FORMAT : 0,
				 &found->device);
		if (error) {
			log_err("udm: %s\n", udm_error());
			free(found->table);
			free(found);
			pthread_mutex_unlock(&lock);
			errno = -error;
			return NULL;
		}
		found->next = devices;
		devices = found;
	}
	found->jobs++;
	pthread_mutex_unlock(&lock);
	return found;
}

static void end_device(struct shared *shared)
{
	if (udm_close(shared->device))
		log_err("udm: %s\n", udm_error());
	free(shared->table);
	free(shared);
}

static void give_up(struct shared *shared)
{
	struct shared **at;

	pthread_mutex_lock(&lock);
	if (--shared->jobs == 0) {
		for (at = &devices; *at != shared; at = &(*at)->next)
			;
		*at = shared->next;
		end_device(shared);
	}
	pthread_mutex_unlock(&lock);
}

/* Closes the devices of jobs that never started. */
static void __attribute__((destructor)) end_all(void)
{
	while (devices) {
		struct shared *next = devices->next;

		end_device(devices);
		devices = next;
	}
}

/* Runs in fio's main thread: fio needs the size before jobs start. */
static int fio_udm_setup(struct thread_data *td)
{
	struct options *o = td->eo;
	struct job *job;

	if (!o->table) {
		log_err("udm: --udm_table is missing\n");
		return 1;
	}
	td->o.use_thread = 1;
	if (td->io_ops_data)
		return 0;
	job = calloc(1, sizeof(*job));
	job->shared = take(o);
	if (!job->shared) {
		free(job);
		return 1;
	}
	td->io_ops_data = job;
	if (!td->files_index) {
		add_file(td, td->o.filename ? td->o.filename : "udm", 0, 0);
		td->o.nr_files = td->o.nr_files ? td->o.nr_files : 1;
		td->o.open_files++;
	}
	td->files[0]->real_file_size = udm_size(job->shared->device);
	return 0;
}

/* Runs in the job's own thread, the only one that may use its queue. */
static int fio_udm_init(struct thread_data *td)
{
	struct job *job = td->io_ops_data;

	job->depth = td->o.iodepth;
	/* At depth 1 a request ends when it has been queued: fio should count that as its time. */
	if (job->depth == 1)
		td->flags |= (unsigned long long)FIO_SYNCIO << TD_ENG_FLAG_SHIFT;
	job->events = calloc(job->depth, sizeof(*job->events));
	if (udm_queue_create(job->shared->device, &job->queue)) {
		log_err("udm: %s\n", udm_error());
		return 1;
	}
	return 0;
}

static void fio_udm_cleanup(struct thread_data *td)
{
	struct job *job = td->io_ops_data;

	if (!job)
		return;
	if (job->queue && udm_queue_destroy(job->queue))
		log_err("udm: %s\n", udm_error());
	give_up(job->shared);
	free(job->events);
	free(job);
	td->io_ops_data = NULL;
}

static int submit(struct thread_data *td, struct io_u *io_u, udm_queue *queue)
{
	uint64_t data = (uintptr_t)io_u;
	unsigned int flags = td->o.sync_io ? UDM_FUA : 0;

	switch (io_u->ddir) {
	case DDIR_READ:
		return udm_read(queue, io_u->offset, io_u->xfer_buf, io_u->xfer_buflen, data, 0);
	case DDIR_WRITE:
		return udm_write(queue, io_u->offset, io_u->xfer_buf, io_u->xfer_buflen, data,
				 flags);
	case DDIR_TRIM:
		return udm_discard(queue, io_u->offset, io_u->xfer_buflen, data, 0);
	case DDIR_SYNC:
	case DDIR_DATASYNC:
		return udm_flush(queue, data, 0);
	default:
		return -EOPNOTSUPP;
	}
}

/* A request that memory can answer is complete when this returns. */
static enum fio_q_status fio_udm_queue(struct thread_data *td, struct io_u *io_u)
{
	struct job *job = td->io_ops_data;
	int error;

	fio_ro_check(td, io_u);
	error = submit(td, io_u, job->queue);
	if (error == -EBUSY)
		return FIO_Q_BUSY;
	if (error) {
		log_err("udm: %s\n", udm_error());
		io_u->error = -error;
		return FIO_Q_COMPLETED;
	}
	if (job->depth == 1) {
		udm_completion done;

		error = udm_reap(job->queue, &done, 1, 1, -1);
		io_u->error = error < 0 ? -error : -done.result;
		return FIO_Q_COMPLETED;
	}
	return FIO_Q_QUEUED;
}

static int fio_udm_getevents(struct thread_data *td, unsigned int min, unsigned int max,
			     const struct timespec *t)
{
	struct job *job = td->io_ops_data;
	int64_t timeout = t ? t->tv_sec * 1000000000LL + t->tv_nsec : -1;
	int count;

	if (max > job->depth)
		max = job->depth;
	count = udm_reap(job->queue, job->events, min, max, timeout);
	if (count < 0) {
		log_err("udm: %s\n", udm_error());
		td_verror(td, -count, "udm_reap");
	}
	return count;
}

static struct io_u *fio_udm_event(struct thread_data *td, int event)
{
	struct job *job = td->io_ops_data;
	struct io_u *io_u = (struct io_u *)(uintptr_t)job->events[event].user_data;

	io_u->error = -job->events[event].result;
	io_u->resid = 0;
	return io_u;
}

/* There is no file. */
static int fio_udm_open(struct thread_data *td, struct fio_file *f)
{
	return 0;
}

static int fio_udm_close(struct thread_data *td, struct fio_file *f)
{
	return 0;
}

static int fio_udm_size(struct thread_data *td, struct fio_file *f)
{
	struct job *job = td->io_ops_data;

	f->real_file_size = udm_size(job->shared->device);
	return 0;
}

static int fio_udm_invalidate(struct thread_data *td, struct fio_file *f)
{
	return 0;
}

struct ioengine_ops ioengine = {
	.name = "udm",
	.version = FIO_IOOPS_VERSION,
	.flags = FIO_DISKLESSIO | FIO_NOEXTEND | FIO_NODISKUTIL | FIO_RAWIO,
	.setup = fio_udm_setup,
	.init = fio_udm_init,
	.cleanup = fio_udm_cleanup,
	.queue = fio_udm_queue,
	.getevents = fio_udm_getevents,
	.event = fio_udm_event,
	.open_file = fio_udm_open,
	.close_file = fio_udm_close,
	.get_file_size = fio_udm_size,
	.invalidate = fio_udm_invalidate,
	.options = options,
	.option_struct_size = sizeof(struct options),
};

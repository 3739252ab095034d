/*
 * A thread that runs verified copies in order, so that a Python event loop neither blocks on them nor
 * competes with them for the interpreter lock.
 *
 * Life of a job (its memory is the submitter's, and stays so):
 *   QUEUED   mp_queue_submit; pointers must stay valid from here until it has finished
 *   RUNNING  the thread took it | CANCELLED  mp_job_cancel came first: it never runs
 *   finished: counted in mp_queue_finished, in order of submission, and the eventfd rings; for a
 *            stream's bytes only if that ends a read, or the loop asked to be told (mp_stream.ring_at)
 *
 * mp_queue_close cancels what is queued, waits for what runs, and counts all of it as finished.
 */
#define _GNU_SOURCE
#include "moonpool_native.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

enum { QUEUED = 0, RUNNING = 1, CANCELLED = 2 };

typedef struct mp_job {
    const uint8_t *source;
    int64_t source_bytes;
    mp_stream *stream; /* if set, `source` is the stream's next bytes, and what follows is not used */
    uint8_t *target;
    int64_t target_bytes;
    const int64_t *spans;
    int64_t num_spans;
    const mp_geometry *geometry;
    const mp_leaf *leaves;
    int64_t num_leaves;
    uint8_t *is_bad;
    mp_result result;
    _Atomic int64_t state;
    struct mp_job *next;
} mp_job;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    pthread_t thread;
    mp_job *first, *last;
    int is_closing;
    int32_t eventfd;
    _Atomic uint64_t finished;
    /* The bell has rung and nobody has looked since: ringing again would only cost a wake-up. */
    _Atomic int is_rung;
} mp_queue;

static mp_read *first_read(mp_queue *queue, const mp_stream *stream)
{
    pthread_mutex_lock(&queue->lock);
    mp_read *read = stream->first;
    pthread_mutex_unlock(&queue->lock);
    return read;
}

static void read_is_done(mp_queue *queue, mp_stream *stream)
{
    pthread_mutex_lock(&queue->lock);
    stream->first = stream->first->next;
    if (stream->first == NULL)
        stream->last = NULL;
    pthread_mutex_unlock(&queue->lock);
    /* The read may be freed as soon as this is seen. */
    atomic_fetch_add(&stream->num_done, 1);
}

/* Give each expected read its part of a message. Returns 1 if the loop has something to do about it. */
static int distribute(mp_queue *queue, mp_job *job)
{
    mp_stream *stream = job->stream;
    const uint8_t *source = job->source;
    int64_t left = job->source_bytes;
    int is_news = 0;
    while (left > 0) {
        mp_read *read = first_read(queue, stream);
        if (read == NULL) {
            job->result = (mp_result){MP_SPAN_OUT_OF_BOUNDS, 0, 0};
            break;
        }
        const int64_t missing = read->num_bytes - read->at;
        const int64_t count = missing < left ? missing : left;
        is_news |= mp_read_take(stream, read, source, count);
        source += count;
        left -= count;
        if (count == missing) {
            read_is_done(queue, stream);
            is_news = 1;
        }
    }
    const int64_t consumed =
        atomic_fetch_add(&stream->num_consumed, job->source_bytes) + job->source_bytes;
    return is_news || consumed >= atomic_load(&stream->ring_at);
}

/* Returns 1 if the loop is to be told at once. */
static int run_job(mp_queue *queue, mp_job *job)
{
    int64_t expected = QUEUED;
    if (!atomic_compare_exchange_strong(&job->state, &expected, RUNNING)) {
        job->result = (mp_result){MP_CLOSED, 0, 0};
        return 1;
    }
    if (job->stream != NULL)
        return distribute(queue, job);
    mp_copy_verify(job->source, job->source_bytes, job->target, job->target_bytes, job->spans,
                   job->num_spans, job->geometry, job->leaves, job->num_leaves, job->is_bad,
                   &job->result);
    return 1;
}

static void *work(void *argument)
{
    mp_queue *queue = argument;
    pthread_mutex_lock(&queue->lock);
    for (;;) {
        while (queue->first == NULL && !queue->is_closing)
            pthread_cond_wait(&queue->wake, &queue->lock);
        mp_job *job = queue->first;
        if (job == NULL)
            break;
        queue->first = job->next;
        if (queue->first == NULL)
            queue->last = NULL;
        if (queue->is_closing) {
            int64_t expected = QUEUED;
            atomic_compare_exchange_strong(&job->state, &expected, CANCELLED);
        }
        pthread_mutex_unlock(&queue->lock);
        const int is_news = run_job(queue, job);
        /* The job may be freed as soon as this is seen. */
        atomic_fetch_add(&queue->finished, 1);
        if (is_news && !atomic_exchange(&queue->is_rung, 1))
            mp_ring(queue->eventfd);
        pthread_mutex_lock(&queue->lock);
    }
    pthread_mutex_unlock(&queue->lock);
    return NULL;
}

/* NULL if there is no memory or no thread. The eventfd stays the caller's. */
MP_EXPORT void *mp_queue_create(int32_t eventfd)
{
    mp_queue *queue = calloc(1, sizeof *queue);
    if (queue == NULL)
        return NULL;
    queue->eventfd = eventfd;
    pthread_mutex_init(&queue->lock, NULL);
    pthread_cond_init(&queue->wake, NULL);
    /* Signals belong to the threads that Python knows. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int failed = pthread_create(&queue->thread, NULL, work, queue);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        free(queue);
        return NULL;
    }
#ifdef __linux__
    pthread_setname_np(queue->thread, "kv-copy");
#endif
    return queue;
}

/* Not after mp_queue_close. */
MP_EXPORT void mp_queue_submit(void *handle, mp_job *job)
{
    mp_queue *queue = handle;
    job->next = NULL;
    atomic_store(&job->state, QUEUED);
    pthread_mutex_lock(&queue->lock);
    if (queue->last != NULL)
        queue->last->next = job;
    else
        queue->first = job;
    queue->last = job;
    pthread_mutex_unlock(&queue->lock);
    pthread_cond_signal(&queue->wake);
}

/* The stream's next read; no byte of it has come yet. Planned, and not expected before. */
MP_EXPORT void mp_stream_expect(void *handle, mp_stream *stream, mp_read *read)
{
    mp_queue *queue = handle;
    read->next = NULL;
    pthread_mutex_lock(&queue->lock);
    if (stream->last != NULL)
        stream->last->next = read;
    else
        stream->first = read;
    stream->last = read;
    pthread_mutex_unlock(&queue->lock);
}

/*
 * Queue the stream's next bytes, which stay the caller's; not more than its expected reads lack. Returns
 * what mp_queue_finished does, but the eventfd may still ring for it.
 */
MP_EXPORT uint64_t mp_stream_feed(void *handle, mp_stream *stream, mp_job *job,
                                  const uint8_t *message, int64_t num_bytes)
{
    mp_queue *queue = handle;
    job->source = message;
    job->source_bytes = num_bytes;
    job->stream = stream;
    mp_queue_submit(queue, job);
    return atomic_load(&queue->finished);
}

/* 1 if the job will not write a byte; 0 if it runs or has finished. */
MP_EXPORT int64_t mp_job_cancel(mp_job *job)
{
    int64_t expected = QUEUED;
    return atomic_compare_exchange_strong(&job->state, &expected, CANCELLED) ||
           expected == CANCELLED;
}

/*
 * How many jobs have finished since the queue was created; their results may be read. Call it after
 * the eventfd was cleared: a job that finishes later rings again.
 */
MP_EXPORT uint64_t mp_queue_finished(void *handle)
{
    mp_queue *queue = handle;
    atomic_store(&queue->is_rung, 0);
    return atomic_load(&queue->finished);
}

/* Cancel what is queued, wait for what runs, end the thread. */
MP_EXPORT void mp_queue_close(void *handle)
{
    mp_queue *queue = handle;
    pthread_mutex_lock(&queue->lock);
    queue->is_closing = 1;
    pthread_mutex_unlock(&queue->lock);
    pthread_cond_signal(&queue->wake);
    pthread_join(queue->thread, NULL);
    pthread_mutex_destroy(&queue->lock);
    pthread_cond_destroy(&queue->wake);
    free(queue);
}

/*
 * The control page: one writer (the engine), any number of readers on the same host.
 *
 *   word 0   progress     step << 16 | layers done, published with release order
 *   word 1   started_ns   CLOCK_MONOTONIC when the running step began, 0 while no step runs
 *
 * Progress is the only word that orders other memory, in both directions. KV bytes and leaves that were
 * written before (step, layers) was published are visible to a reader that has seen it. And a reader that
 * has read leaves and then still sees an earlier step has read nothing that a later one wrote: hence the
 * two fences, which only processors that reorder stores, or loads, need.
 */
#include "moonpool_native.h"

#include <errno.h>
#include <stdatomic.h>
#include <unistd.h>

_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "the control page needs lock-free 64-bit atomics");

enum { PROGRESS = 0, STARTED_NS = 1 };

static _Atomic uint64_t *word(void *page, int index)
{
    return (_Atomic uint64_t *)page + index;
}

/* A step begins: no layer is done. */
MP_EXPORT void mp_begin_step(void *page, uint64_t step, uint64_t now_ns)
{
    atomic_store_explicit(word(page, STARTED_NS), now_ns, memory_order_relaxed);
    atomic_store_explicit(word(page, PROGRESS), step << 16, memory_order_release);
    /* Before anything that this step writes. */
    atomic_thread_fence(memory_order_release);
}

/* All that was written for layers [0, layers_done) of `step` may be read. */
MP_EXPORT void mp_publish(void *page, uint64_t step, uint32_t layers_done)
{
    atomic_store_explicit(word(page, PROGRESS), step << 16 | layers_done, memory_order_release);
}

/* The step has ended; progress keeps its last value. */
MP_EXPORT void mp_end_step(void *page)
{
    atomic_store_explicit(word(page, STARTED_NS), 0, memory_order_release);
}

MP_EXPORT uint64_t mp_progress(void *page)
{
    /* After everything that the caller has read. */
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit(word(page, PROGRESS), memory_order_acquire);
}

MP_EXPORT uint64_t mp_started_ns(void *page)
{
    return atomic_load_explicit(word(page, STARTED_NS), memory_order_acquire);
}

/* Add one to an eventfd. A full counter is as loud as it gets: not an error. Returns an errno. */
MP_EXPORT int64_t mp_ring(int32_t eventfd)
{
    const uint64_t one = 1;
    while (write(eventfd, &one, sizeof one) < 0) {
        if (errno == EAGAIN)
            return 0;
        if (errno != EINTR)
            return errno;
    }
    return 0;
}

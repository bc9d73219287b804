/* Threads of the OpenMP library that torch uses: the code links to none, and runs on one thread until it has
 * addresses. */

#include <stdint.h>

typedef void (*parallel_t)(void (*)(void *), void *, unsigned, unsigned);
static parallel_t gomp_parallel;
static int (*gomp_thread)(void), (*gomp_threads)(void);

/* Addresses of GOMP_parallel, omp_get_thread_num and omp_get_num_threads. */
void nc_threads(void *parallel, void *thread, void *threads)
{
    gomp_thread = (int (*)(void))thread;
    gomp_threads = (int (*)(void))threads;
    gomp_parallel = (parallel_t)parallel;
}

/* Does one of so many parts of some work. */
typedef void (*work_t)(void *data, int64_t part, int64_t parts);

struct divided {
    work_t work;
    void *data;
    int64_t parts;
};

static void each_part(void *data)
{
    const struct divided *all = data;
    for (int64_t part = gomp_thread(); part < all->parts; part += gomp_threads())
        all->work(all->data, part, all->parts);
}

/* Do some work in parts, of which there are as many as threads at most.
 *
 * All threads are called, also those that get no part: libgomp ends the threads that a smaller team leaves
 * over, and makes new ones for the next larger team. That took longer than most work here.
 */
static void in_parts(work_t work, void *data, int64_t parts, int64_t threads)
{
    struct divided all = {work, data, parts < threads ? parts : threads};
    if (all.parts > 1 && gomp_parallel)
        gomp_parallel(each_part, &all, (unsigned)threads, 0);
    else
        work(data, 0, 1);
}

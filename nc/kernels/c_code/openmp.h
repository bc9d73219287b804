/* Threads of the OpenMP library that torch uses: the code links to none, and runs on one thread until it has
 * addresses. */

#include <stdint.h>
#include <time.h>

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

/* What a call did in parts, while this thread measures it. */
static __thread struct nc_turns *turns;

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void each_in_turn(const struct divided *all)
{
    const int64_t region = turns->regions < MOST_REGIONS ? turns->regions : MOST_REGIONS - 1;
    for (int64_t part = 0; part < all->parts; part++) {
        const double begin = seconds();
        all->work(all->data, part, all->parts);
        const double taken = seconds() - begin;
        turns->each[region][part < MOST_PARTS ? part : MOST_PARTS - 1] += taken;
        turns->divided += taken;
    }
    turns->regions++;
    turns->parts = all->parts > turns->parts ? all->parts : turns->parts;
}

/* Calls a function on this thread alone, part by part, and notes what it does in parts: as many as it is told
 * to make by its number of threads, which may be more than this machine has. It computes the same. */
int nc_run_in_turn(const struct nc_in_turn *call, void *unused, int count, char *const *tensors)
{
    struct nc_turns *noted = (struct nc_turns *)(uintptr_t)call->turns;
    int (*function)(const void *, void *, int, char *const *) =
        (int (*)(const void *, void *, int, char *const *))(uintptr_t)call->function;
    *noted = (struct nc_turns){.size = sizeof *noted, .parts = 1};
    turns = noted;
    const double begin = seconds();
    const int status = function((const void *)(uintptr_t)call->how, unused, count, tensors);
    noted->seconds = seconds() - begin;
    turns = 0;
    return status;
}

/* Do some work in parts, of which there are as many as threads at most.
 *
 * All threads are called, also those that get no part: libgomp ends the threads that a smaller team leaves
 * over, and makes new ones for the next larger team. That took longer than most work here.
 */
static void in_parts(work_t work, void *data, int64_t parts, int64_t threads)
{
    struct divided all = {work, data, parts < threads ? parts : threads};
    if (turns && all.parts > 1)
        each_in_turn(&all);
    else if (all.parts > 1 && gomp_parallel)
        gomp_parallel(each_part, &all, (unsigned)threads, 0);
    else
        work(data, 0, 1);
}

/* Threads of the OpenMP library that torch uses: the code links to none, and runs on one thread until it has addresses. */

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

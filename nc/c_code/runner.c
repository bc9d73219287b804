/* Runs a list of oneDNN primitives that was prepared before. Links to nothing: the functions come as pointers. */

typedef int (*execute_t)(const void *primitive, void *stream, int count, const void *arguments);
typedef int (*place_t)(void *memory, void *address);

struct call {
    const void *primitive;
    const void *arguments;
    long count;
};

/* A memory object whose address is known at each call only: that of base number `base`, plus `offset` bytes. */
struct place {
    void *memory;
    long base;
    long offset;
};

/* Returns 0, or -1 - index of the place, or 1 + index of the call that failed. */
long nc_run(execute_t execute, place_t set, void *stream, const struct place *places, long n_places, char *const *bases,
            const struct call *calls, long n_calls)
{
    for (long i = 0; i < n_places; i++)
        if (set(places[i].memory, bases[places[i].base] + places[i].offset))
            return -1 - i;
    for (long i = 0; i < n_calls; i++)
        if (execute(calls[i].primitive, stream, (int)calls[i].count, calls[i].arguments))
            return 1 + i;
    return 0;
}

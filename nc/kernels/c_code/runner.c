/* Runs a list of calls that was prepared before: of oneDNN primitives, and of functions of the same form.
 * Links to nothing: the functions come as pointers. */

typedef int (*execute_t)(const void *what, void *stream, int count, const void *arguments);
typedef int (*place_t)(void *memory, void *address);

struct call {
    execute_t execute;
    const void *what;
    const void *arguments;
    long count;
};

/* Memory whose address is known at each call only: that of base number `base`, plus `offset` bytes. */
struct place {
    place_t set;
    void *memory;
    long base;
    long offset;
};

/* Returns 0, or -1 - index of the place that failed, or of a call 1 + its index, and what it returned in the
 * bits from 32 on. */
long nc_run(void *stream, const struct place *places, long n_places, char *const *bases,
    const struct call *calls, long n_calls)
{
    for (long i = 0; i < n_places; i++)
        if (places[i].set(places[i].memory, bases[places[i].base] + places[i].offset))
            return -1 - i;
    for (long i = 0; i < n_calls; i++) {
        const int status = calls[i].execute(calls[i].what, stream, (int)calls[i].count, calls[i].arguments);
        if (status)
            return (long)(unsigned)status << 32 | (1 + i);
    }
    return 0;
}

int64_t nc_isas(void) { return 0; }
int64_t nc_written_for(void) { return 0; }

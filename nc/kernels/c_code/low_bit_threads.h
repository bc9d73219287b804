/* How low_bit.c and low_bit_blocks.c divide rows and outputs among threads. */

struct job;
typedef void (*part_t)(const struct job *, int64_t start, int64_t stop);

struct shared {
    const struct job *job;
    part_t part;
    int64_t count, step;
};

static void share(void *data, int64_t part, int64_t parts)
{
    const struct shared *s = data;
    int64_t units = (s->count + s->step - 1) / s->step;
    int64_t start = units * part / parts * s->step, stop = units * (part + 1) / parts * s->step;
    if (stop > s->count)
        stop = s->count;
    if (start < stop)
        s->part(s->job, start, stop);
}

/* part(job, start, stop) for all of 0..count, in `parts` at most; `step` of them are not divided. */
static void run(const struct job *job, part_t part, int64_t count, int64_t step, int64_t parts,
    int64_t threads)
{
    struct shared s = {job, part, count, step};
    int64_t units = (count + step - 1) / step;
    in_parts(share, &s, parts < units ? parts : units, threads);
}

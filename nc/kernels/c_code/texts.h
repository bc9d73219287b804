/* Attention over texts whose rows follow each other: text t has those from starts[t] to before starts[t + 1]. */

/* A query costs as much as its products with so many keys more than there are: its codes, its softmax, and its
 * part of the packing of keys. */
enum { KEYS_OF_A_QUERY = 64, ROWS_OF_A_SHARE = 16 };

struct texts {
    const int32_t *starts;
    int64_t count, heads;
};

/* OK, or what is wrong with them. */
static int check_texts(const struct texts *texts, int64_t rows, int64_t longest)
{
    EXPECT(texts->starts[0] == 0 && texts->starts[texts->count] == rows, OTHER_SIZE);
    for (int64_t t = 0; t < texts->count; t++) {
        const int64_t n = (int64_t)texts->starts[t + 1] - texts->starts[t];
        EXPECT(n >= 0 && n <= longest, OTHER_SIZE);
    }
    return OK;
}

/* What a head of a text costs, in products of rows. */
static int64_t cost_of_text(const struct texts *texts, int64_t t)
{
    const int64_t n = (int64_t)texts->starts[t + 1] - texts->starts[t];
    return n * (n + KEYS_OF_A_QUERY);
}

static int64_t cost_of_texts(const struct texts *texts)
{
    int64_t cost = 0;
    for (int64_t t = 0; t < texts->count; t++)
        cost += cost_of_text(texts, t);
    return cost * texts->heads;
}

/* The first of n rows whose cost, counted from `before` on, is not below `at`; some rows go together. */
static int64_t row_at(int64_t at, int64_t before, int64_t n)
{
    if (at <= before)
        return 0;
    const int64_t of_row = n + KEYS_OF_A_QUERY, share = ROWS_OF_A_SHARE * of_row;
    const int64_t row = (at - before + share - 1) / share * ROWS_OF_A_SHARE;
    return row < n ? row : n;
}

/* Does one part of the work on texts: rows from `first` to before `end` of a head of a text, of its own. */
typedef void (*on_rows_t)(void *data, int64_t text, int64_t head, int64_t first, int64_t end);

static void each_text(const struct texts *texts, on_rows_t on_rows, void *data, int64_t part, int64_t parts)
{
    const int64_t all = cost_of_texts(texts), from = all / parts * part + all % parts * part / parts,
        to = all / parts * (part + 1) + all % parts * (part + 1) / parts;
    int64_t before = 0;
    for (int64_t t = 0; t < texts->count && before < to; t++) {
        const int64_t n = (int64_t)texts->starts[t + 1] - texts->starts[t], cost = cost_of_text(texts, t);
        for (int64_t head = 0; head < texts->heads; head++, before += cost) {
            const int64_t first = row_at(from, before, n), end = row_at(to, before, n);
            if (first < end)
                on_rows(data, t, head, first, end);
        }
    }
}

/* A block of queries of flash.c, for one instruction set: NAMED, FOR_THIS, VECTOR, OF_VECTOR, LARGEST, TRANSPOSE,
 * WIDENED, ADD_PRODUCTS, PAIRED and STORE_BF16 are defined where this is included. It takes the definitions
 * away.
 *
 * A slot of 32 bits holds one number of fp32, or two of bf16 whose products are added at once: two next to each
 * other of a query or key, values of two keys, and the weights of two keys. */

#define LANES NAMED(LANES)
#define AT_ONCE NAMED(AT_ONCE)
#define IN_SLOT NAMED(IN_SLOT)

/* Some numbers of a row as fp32, from one on; 0 where none is left. */
INLINE FOR_THIS VECTOR NAMED(numbers)(const char *row, int64_t bytes, int64_t at, int64_t left)
{
    char some[LANES * 4];
    const char *from = row + at * bytes;
    if (left < LANES) {
        memset(some, 0, sizeof some);
        memcpy(some, from, (size_t)(left * bytes));
        from = some;
    }
    return bytes == 4 ? OF_VECTOR(loadu)((const float *)from) : WIDENED(from);
}

/* Some slots of a query or key, from one on; 0 where none is left. */
INLINE FOR_THIS VECTOR NAMED(slots)(const char *row, int64_t bytes, int64_t at, int64_t width)
{
    if (IN_SLOT == 1)
        return NAMED(numbers)(row, bytes, at, width - at);
    char some[LANES * 4];
    const char *from = row + at * 4;
    const int64_t left = 2 * width - 4 * at;
    if (left < LANES * 4) {
        memset(some, 0, sizeof some);
        memcpy(some, from, (size_t)left);
        from = some;
    }
    return OF_VECTOR(loadu)((const float *)from);
}

/* As many slots as hold so many numbers. */
INLINE int64_t NAMED(slots_of)(int64_t numbers) { return (numbers + IN_SLOT - 1) / IN_SLOT; }

/* Copies keys of a block, `COLUMNS` side by side. Those up to a whole panel are 0. */
static FOR_THIS void NAMED(pack_keys)(const struct job *job, const struct room *room, const struct text *text,
    int64_t key, int64_t count)
{
    const struct nc_flash *how = job->how;
    const int64_t bytes = bytes_of(how), deep = NAMED(slots_of)(how->width);
    for (int64_t n = 0; n < up(count, COLUMNS); n += LANES) {
        const char *rows[LANES];
        float *to = room->keys + n / COLUMNS * COLUMNS * deep + n % COLUMNS;
        for (int i = 0; i < LANES; i++)
            rows[i] = n + i < count ? key_at(job, 2, text, key + n + i) : NULL;
        for (int64_t t = 0; t < deep; t += LANES) {
            VECTOR x[LANES];
            for (int i = 0; i < LANES; i++)
                x[i] = rows[i] ? NAMED(slots)(rows[i], bytes, t, how->width) : OF_VECTOR(setzero)();
            TRANSPOSE(x);
            for (int64_t i = 0; i < LANES && t + i < deep; i++)
                OF_VECTOR(storeu)(to + (t + i) * COLUMNS, x[i]);
        }
    }
}

/* Copies values of a block. */
static FOR_THIS void NAMED(pack_values)(const struct job *job, const struct room *room,
    const struct text *text, int64_t key, int64_t count)
{
    const struct nc_flash *how = job->how;
    const int64_t bytes = bytes_of(how), wide = up(how->wide, COLUMNS);
    for (int64_t n = 0; n < count; n += IN_SLOT) {
        const char *row = key_at(job, 3, text, key + n);
        const char *next = IN_SLOT == 2 && n + 1 < count ? key_at(job, 3, text, key + n + 1) : NULL;
        for (int64_t i = 0; i < how->wide; i += LANES) {
            VECTOR x = NAMED(numbers)(row, bytes, i, how->wide - i);
            if (IN_SLOT == 2)
                x = PAIRED(x, next ? NAMED(numbers)(next, bytes, i, how->wide - i) : OF_VECTOR(setzero)());
            OF_VECTOR(storeu)(room->values + n / IN_SLOT * wide + i, x);
        }
    }
}

/* Scores of one query, with keys where they are: a copy would be read too few times. */
static FOR_THIS void NAMED(scores_in_place)(const struct job *job, const struct text *text,
    const float *query, int64_t key, int64_t count, float *scores)
{
    const int64_t bytes = bytes_of(job->how), width = job->how->width;
    for (int64_t n = 0; n < count; n += LANES) {
        const char *rows[LANES];
        VECTOR sums[LANES];
        for (int i = 0; i < LANES; i++) {
            rows[i] = key_at(job, 2, text, key + least_of(n + i, count - 1));
            sums[i] = OF_VECTOR(setzero)();
        }
        for (int64_t t = 0; t < NAMED(slots_of)(width); t += LANES) {
            const VECTOR q = OF_VECTOR(loadu)(query + t);
            UNROLL_16 for (int i = 0; i < LANES; i++)
                ADD_PRODUCTS(sums[i], q, NAMED(slots)(rows[i], bytes, t, width));
        }
        TRANSPOSE(sums);
        UNROLL_16 for (int step = LANES / 2; step; step /= 2)
            UNROLL_16 for (int i = 0; i < step; i++)
                sums[i] = OF_VECTOR(add)(sums[i], sums[i + step]);
        OF_VECTOR(storeu)(scores + n, sums[0]);
    }
}

/* y[r][c] = y[r][c] * factors[r] + sum over n of x[r][n] * w[n][c] for some rows, and vectors that are `apart`
 * in w; `line` numbers from one n to the next. Without factors y is not read. */
INLINE FOR_THIS void NAMED(multiply)(const int rows, const int vectors, const float *x, const int64_t x_row,
    int64_t n, const float *w, int64_t apart, int64_t line, float *y, int64_t y_row, const float *factors)
{
    VECTOR sums[TILE_ROWS][AT_ONCE];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < vectors; c++)
            sums[r][c] = factors ? OF_VECTOR(mul)(OF_VECTOR(loadu)(y + r * y_row + c * LANES),
                                       OF_VECTOR(set1)(factors[r]))
                                 : OF_VECTOR(setzero)();
    for (int64_t i = 0; i < n; i++) {
        VECTOR right[AT_ONCE];
        UNROLL for (int c = 0; c < vectors; c++)
            right[c] = OF_VECTOR(loadu)(w + c * apart + i * line);
        UNROLL for (int r = 0; r < rows; r++)
        {
            const VECTOR left = OF_VECTOR(set1)(x[r * x_row + i]);
            UNROLL for (int c = 0; c < vectors; c++)
                ADD_PRODUCTS(sums[r][c], left, right[c]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < vectors; c++)
            OF_VECTOR(storeu)(y + r * y_row + c * LANES, sums[r][c]);
}

/* All of so many vectors. */
INLINE FOR_THIS void NAMED(multiply_all)(const int rows, int64_t vectors, const float *x, const int64_t x_row,
    int64_t n, const float *w, int64_t apart, int64_t line, float *y, int64_t y_row, const float *factors)
{
    int64_t done = 0;
#define MULTIPLY(some)                                                                                    \
    NAMED(multiply)(rows, some, x, x_row, n, w + done * apart, apart, line, y + done * LANES, y_row, factors)
    for (; done + AT_ONCE <= vectors; done += AT_ONCE)
        MULTIPLY(AT_ONCE);
    for (; done < vectors; done++)
        MULTIPLY(1);
#undef MULTIPLY
}

/* Products of some rows with panels. */
INLINE FOR_THIS void NAMED(multiply_panels)(const int rows, const float *x, int64_t x_row, int64_t deep,
    const float *w, int64_t panels, float *y, int64_t y_row)
{
    if (LANES == COLUMNS)
        NAMED(multiply_all)(rows, panels, x, x_row, deep, w, deep * COLUMNS, COLUMNS, y, y_row, NULL);
    else
        for (int64_t panel = 0; panel < panels; panel++)
            NAMED(multiply_all)
            (rows, COLUMNS / LANES, x, x_row, deep, w + panel * deep * COLUMNS, LANES, COLUMNS,
                y + panel * COLUMNS, y_row, NULL);
}

/* DO_ROWS(count, call) makes a call with the number of rows as a constant. */
#define DO_ROWS(count, CALL)    \
    switch (count) {            \
    case 1: CALL(1); break;     \
    case 2: CALL(2); break;     \
    case 3: CALL(3); break;     \
    case 4: CALL(4); break;     \
    case 5: CALL(5); break;     \
    case 6: CALL(6); break;     \
    }
_Static_assert(TILE_ROWS == 6, "DO_ROWS has a case for each number of rows");

static FOR_THIS void NAMED(scores)(int64_t rows, const float *queries, const float *keys, int64_t deep,
    int64_t panels, float *scores)
{
#define SCORES(n) NAMED(multiply_panels)(n, queries, QUERY, deep, keys, panels, scores, LINE)
    DO_ROWS(rows, SCORES)
#undef SCORES
}

/* Products of queries or keys with the columns of distances, see struct by_distance. */
static FOR_THIS void NAMED(by_distance)(int64_t rows, const float *x, int64_t x_row, int64_t deep,
    const float *panels, int64_t count, float *y)
{
    enum { SOME = 4 }; /* panels that stay in the first cache for all rows */
#define BY_DISTANCE(n) NAMED(multiply_panels)(n, x + r * x_row, x_row, deep, w, some, to + r * AWAY, AWAY)
    for (int64_t panel = 0; panel < count; panel += SOME) {
        const int64_t some = least_of(SOME, count - panel);
        const float *w = panels + panel * deep * COLUMNS;
        float *to = y + panel * COLUMNS;
        for (int64_t r = 0; r < rows; r += TILE_ROWS)
            DO_ROWS(least_of(TILE_ROWS, rows - r), BY_DISTANCE)
    }
#undef BY_DISTANCE
}

static FOR_THIS void NAMED(add_values)(int64_t rows, const float *weights, int64_t n, const float *values,
    int64_t line, int64_t wide, float *results, const float *factors)
{
#define ADD_VALUES(m) \
    NAMED(multiply_all)(m, wide / LANES, weights, LINE, n, values, LANES, line, results, wide, factors)
    DO_ROWS(rows, ADD_VALUES)
#undef ADD_VALUES
}
#undef DO_ROWS

/* cap * tanh(x), by e^(-2 |x|): it can't overflow. */
INLINE FOR_THIS VECTOR NAMED(capped)(VECTOR x, VECTOR cap)
{
    const VECTOR one = OF_VECTOR(set1)(1.0f);
    const VECTOR most = OF_VECTOR(max)(OF_VECTOR(sub)(OF_VECTOR(setzero)(), x), x);
    const VECTOR e = NAMED(weight)(OF_VECTOR(mul)(most, OF_VECTOR(set1)(-2.0f)));
    const VECTOR size = OF_VECTOR(div)(OF_VECTOR(sub)(one, e), OF_VECTOR(add)(one, e));
    /* x / |x|, and 1 where both are 0: it only gives the sign */
    const VECTOR tiny = OF_VECTOR(set1)(1e-30f);
    const VECTOR sign = OF_VECTOR(max)(OF_VECTOR(set1)(-1.0f),
        OF_VECTOR(min)(one, OF_VECTOR(div)(x, OF_VECTOR(max)(tiny, most))));
    return OF_VECTOR(mul)(cap, OF_VECTOR(mul)(size, sign));
}

/* Scores of a row become e^(score - the largest one so far); what it sees is `seen`, all other keys from `first`
 * to `last` get 0. `added`: to scores, by keys, or NULL. Returns what the sums of earlier keys are multiplied
 * by. */
INLINE FOR_THIS float NAMED(weigh)(const struct nc_flash *how, float *scores, struct span seen, int64_t first,
    int64_t last, VECTOR factor, const float *added, float *sums, float *most_so_far)
{
    if (IN_SLOT == 2) /* the factor would have rounded queries */
        for (int64_t i = first; i < last; i += LANES)
            OF_VECTOR(storeu)(scores + i, OF_VECTOR(mul)(OF_VECTOR(loadu)(scores + i), factor));
    if (how->softcap > 0) {
        const VECTOR cap = OF_VECTOR(set1)((float)how->softcap);
        for (int64_t i = first; i < last; i += LANES)
            OF_VECTOR(storeu)(scores + i, NAMED(capped)(OF_VECTOR(loadu)(scores + i), cap));
    }
    if (added) {
        const int64_t end = least_of(last, seen.last);
        int64_t i = most_of(first, seen.first);
        for (; i + LANES <= end; i += LANES)
            OF_VECTOR(storeu)(scores + i, OF_VECTOR(add)(OF_VECTOR(loadu)(scores + i),
                OF_VECTOR(loadu)(added + i)));
        for (; i < end; i++)
            scores[i] += added[i];
    }
    for (int64_t i = first; i < last && i < seen.first; i++)
        scores[i] = -INFINITY;
    for (int64_t i = most_of(first, seen.last); i < last; i++)
        scores[i] = -INFINITY;
    VECTOR most = OF_VECTOR(set1)(-INFINITY), sum = OF_VECTOR(setzero)();
    for (int64_t i = first; i < last; i += LANES)
        most = OF_VECTOR(max)(OF_VECTOR(loadu)(scores + i), most); /* not what is no number */
    const float before = *most_so_far, here = LARGEST(most), now = before > here ? before : here;
    const float largest = now == -INFINITY ? 0 : now;
    const VECTOR taken = OF_VECTOR(set1)(largest);
    for (int64_t i = first; i < last; i += LANES) {
        const VECTOR e = NAMED(weight)(OF_VECTOR(sub)(OF_VECTOR(loadu)(scores + i), taken));
        sum = OF_VECTOR(add)(sum, e);
        if (IN_SLOT == 2)
            STORE_BF16((uint16_t *)scores + i, e);
        else
            OF_VECTOR(storeu)(scores + i, e);
    }
    float factors[LANES];
    const VECTOR less = NAMED(weight)(OF_VECTOR(set1)(before - largest));
    OF_VECTOR(storeu)(factors, less);
    OF_VECTOR(storeu)(sums, OF_VECTOR(fmadd)(OF_VECTOR(loadu)(sums), less, sum));
    *most_so_far = now;
    return factors[0];
}

/* Of products, before the cap. */
INLINE FOR_THIS VECTOR NAMED(factor_of)(const struct nc_flash *how)
{
    return OF_VECTOR(set1)((float)(how->softcap > 0 ? how->factor / how->softcap : how->factor));
}

/* What some queries see of a block of keys. */
INLINE struct span NAMED(seen_here)(const struct nc_flash *how, const struct text *text, int64_t query,
    int64_t rows, int64_t key, int64_t count)
{
    const struct span seen = seen_by_some(how, text, query, rows);
    return (struct span){most_of(0, seen.first - key), least_of(count, seen.last - key)};
}

/* Adds to the scores of a block what depends on distances. */
static FOR_THIS void NAMED(add_by_distance)(const struct job *job, const struct room *room,
    const struct text *text, int64_t query, int64_t rows, int64_t key, int64_t count)
{
    const struct nc_flash *how = job->how;
    for (int of_keys = 0; of_keys < 2; of_keys++) {
        const struct by_distance *by = of_keys ? &job->of_keys : &job->of_queries;
        if (!by->columns)
            continue;
        const struct span some = columns_of(job, by, query, rows, key, count);
        const float *x = of_keys ? (const float *)key_at(job, 2, text, key)
                                 : (const float *)query_at(job, job->tensors[1], how->q_strides, text, query);
        const int64_t x_row = of_keys ? how->k_strides[0] : how->q_strides[0];
        const float *panels = by->panels + (text->head * up(by->columns, COLUMNS) + some.first) * how->width;
        float *products = of_keys ? room->of_keys : room->of_queries;
        NAMED(by_distance)
        (of_keys ? count : rows, x, x_row, how->width, panels, (some.last - some.first) / COLUMNS, products);
        for (int64_t r = 0; r < rows; r++) {
            const int32_t *column = by->column + how->distances - 1 + key - (query + r);
            const float *from = products + (of_keys ? 0 : r * AWAY);
            float *scores = room->scores + r * LINE;
            for (int64_t i = 0; i < count; i++)
                scores[i] += from[column[i] - some.first + (of_keys ? i * AWAY : 0)];
        }
    }
}

/* A block of keys, for all queries of a block. */
static FOR_THIS void NAMED(add_keys)(const struct job *job, const struct room *room, const struct text *text,
    int64_t query, int64_t rows, int64_t key, int64_t count)
{
    enum { SOME = 64 }; /* keys that stay in the first cache for all rows */
    const struct nc_flash *how = job->how;
    const int64_t wide = up(how->wide, COLUMNS), tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t deep = NAMED(slots_of)(how->width);
    const VECTOR factor = NAMED(factor_of)(how);
    const int in_place = tiles == 1 && bytes_of(how) == 4 && how->wide == wide;
    if (!in_place)
        NAMED(pack_values)(job, room, text, key, count);
    if (text->queries <= FEW)
        for (int64_t r = 0; r < rows; r++)
            NAMED(scores_in_place)
            (job, text, room->queries + r * QUERY, key, count, room->scores + r * LINE);
    else
        NAMED(pack_keys)(job, room, text, key, count);
    for (int64_t n = 0; text->queries > FEW && n < count; n += SOME)
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t row = rows * tile / tiles, of_tile = rows * (tile + 1) / tiles - row;
            const struct span seen = NAMED(seen_here)(how, text, query + row, of_tile, key, count);
            if (n < seen.last && n + SOME > seen.first)
                NAMED(scores)
                (of_tile, room->queries + row * QUERY, room->keys + n * deep, deep,
                    (least_of(SOME, count - n) + COLUMNS - 1) / COLUMNS, room->scores + row * LINE + n);
        }
    if (IN_SLOT == 1 && how->distances)
        NAMED(add_by_distance)(job, room, text, query, rows, key, count);
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t row = rows * tile / tiles, of_tile = rows * (tile + 1) / tiles - row;
        const struct span seen = NAMED(seen_here)(how, text, query + row, of_tile, key, count);
        if (seen.first >= seen.last)
            continue;
        const int64_t first = seen.first / COLUMNS * COLUMNS, last = up(seen.last, COLUMNS);
        float factors[TILE_ROWS];
        for (int64_t r = row; r < row + of_tile; r++) {
            struct span of_row = seen_by(how, text, query + r);
            of_row = (struct span){of_row.first - key, of_row.last - key};
            const float *added = added_to(job, text, query + r);
            factors[r - row] = NAMED(weigh)(how, room->scores + r * LINE, of_row, first, last, factor,
                added ? added + key : NULL, room->sums + r * 16, room->most + r);
        }
        if (!in_place) {
            NAMED(add_values)
            (of_tile, room->scores + row * LINE + first / IN_SLOT, NAMED(slots_of)(seen.last - first),
                room->values + first / IN_SLOT * wide, wide, wide, room->results + row * wide, factors);
            continue;
        }
        for (int64_t n = first; n < seen.last;) { /* up to the end of each page */
            const int64_t left = seen.last - n, size = how->block_size;
            const int64_t some = job->table ? least_of(left, size - (key + n) % size) : left;
            NAMED(add_values)
            (of_tile, room->scores + row * LINE + n, some, (const float *)key_at(job, 3, text, key + n),
                how->v_strides[0], wide, room->results + row * wide, factors);
            for (int i = 0; i < TILE_ROWS; i++)
                factors[i] = 1;
            n += some;
        }
    }
}

/* A block of queries. */
static FOR_THIS void NAMED(attend)(const struct job *job, const struct room *room, const struct text *text,
    int64_t query, int64_t rows)
{
    const struct nc_flash *how = job->how;
    const int64_t bytes = bytes_of(how), wide = up(how->wide, COLUMNS);
    const VECTOR factor = NAMED(factor_of)(how);
    for (int64_t r = 0; r < rows; r++) {
        const char *q = query_at(job, job->tensors[1], how->q_strides, text, query + r);
        for (int64_t i = 0; i < NAMED(slots_of)(how->width); i += LANES) {
            const VECTOR x = NAMED(slots)(q, bytes, i, how->width);
            OF_VECTOR(storeu)(room->queries + r * QUERY + i, IN_SLOT == 2 ? x : OF_VECTOR(mul)(factor, x));
        }
        room->most[r] = -INFINITY;
    }
    memset(room->sums, 0, (size_t)rows * 16 * 4);
    memset(room->results, 0, (size_t)(rows * wide) * 4);
    const struct span seen = seen_by_some(how, text, query, rows);
    for (int64_t key = seen.first / FLASH_KEYS * FLASH_KEYS; key < seen.last; key += FLASH_KEYS)
        NAMED(add_keys)(job, room, text, query, rows, key, least_of(FLASH_KEYS, text->keys - key));
    for (int64_t r = 0; r < rows; r++) {
        char *y = query_at(job, job->tensors[0], how->y_strides, text, query + r);
        float sum = 0;
        for (int i = 0; i < LANES; i++)
            sum += room->sums[r * 16 + i];
        const VECTOR inverse = OF_VECTOR(set1)(sum == 0 ? 0 : 1 / sum); /* 0: it sees no key */
        float *result = room->results + r * wide;
        for (int64_t i = 0; i < how->wide; i += LANES)
            OF_VECTOR(storeu)(result + i, OF_VECTOR(mul)(inverse, OF_VECTOR(loadu)(result + i)));
        if (bytes == 4)
            memcpy(y, result, (size_t)how->wide * 4);
        else
            for (int64_t i = 0; i < how->wide; i++)
                ((uint16_t *)y)[i] = to_bf16(result[i]);
    }
}

#undef LANES
#undef AT_ONCE
#undef IN_SLOT
#undef ADD_PRODUCTS
#undef PAIRED
#undef STORE_BF16
#undef NAMED
#undef FOR_THIS
#undef VECTOR
#undef OF_VECTOR
#undef LARGEST
#undef TRANSPOSE
#undef WIDENED

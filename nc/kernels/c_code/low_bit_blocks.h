/* The forms `few` and `many` of low_bit_blocks.c, which includes this once for each width of registers and
 * defines before:
 * PANELS, VECTORS, TILE_ROWS, TARGET, NAME, VECTOR, OP, and decode, from_half and store.
 */

#define LANES (PANEL / VECTORS)

/* 16 scales of vector v from element `at` on. */
INLINE TARGET VECTOR NAME(scale_of)(const struct weight *w, int64_t at)
{
    if (w->scale_dtype == DTYPE_F32)
        return OP(loadu_ps)((const float *)w->scale + at);
    return NAME(from_half)((const uint16_t *)w->scale + at, w->scale_dtype == DTYPE_BF16);
}

/* y = sum * factor + bias for a row of a panel. */
INLINE TARGET void NAME(finish)(const struct job *j, int64_t p, int64_t m, const VECTOR *sum)
{
    UNROLL for (int v = 0; v < VECTORS; v++)
    {
        const int64_t n = p * PANEL + v * LANES, left = j->w.outputs - n;
        VECTOR value = OP(mul_ps)(sum[v], OP(loadu_ps)(j->w.factor + n));
        float bias[LANES];
        if (j->bias && left > 0) {
            memset(bias, 0, sizeof bias);
            memcpy(bias, j->bias + n, (size_t)(left < LANES ? left : LANES) * sizeof *bias);
            value = OP(add_ps)(value, OP(loadu_ps)(bias));
        }
        NAME(store)(j->y + m * j->w.outputs + n, value, left);
    }
}

/* P panels times R rows. */
INLINE TARGET void NAME(few_tile)(const struct job *j, int64_t p, int64_t m, const int P, const int R,
    const int kind)
{
    const struct weight *w = &j->w;
    const int bytes = kind == CODING_TABLE ? PANEL / 2 : PANEL;
    const int C = P * R * VECTORS <= 4 ? 2 : 1; /* chains of sums: one alone would wait for itself */
    const uint8_t *at[PANELS];
    const float *x[4];
    VECTOR sum[4][PANELS][VECTORS];
    UNROLL for (int r = 0; r < R; r++) x[r] = row_of(j, m + r);
    UNROLL for (int q = 0; q < P; q++)
    {
        at[q] = codes_at(w, p + q, 0);
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < VECTORS; v++)
            sum[r][q][v] = OP(setzero_ps)();
    }
    for (int64_t g = 0; g < w->groups; g++) {
        VECTOR acc[4][PANELS][VECTORS][2];
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int q = 0; q < P; q++)
            UNROLL for (int v = 0; v < VECTORS; v++)
                acc[r][q][v][0] = acc[r][q][v][1] = OP(setzero_ps)();
        for (int64_t k = 0; k < w->held; k += STEP) {
            UNROLL for (int q = 0; q < P; q++)
            {
                VECTOR values[STEP][VECTORS];
                if (R == 1)
                    for (int line = 0; line < STEP * bytes; line += 64)
                        _mm_prefetch((const char *)at[q] + 2048 + line, _MM_HINT_T0);
                NAME(decode)(at[q], kind, w->table, values);
                at[q] += STEP * bytes;
                UNROLL for (int i = 0; i < STEP; i++) UNROLL for (int r = 0; r < R; r++)
                    UNROLL for (int v = 0; v < VECTORS; v++)
                        acc[r][q][v][i % C] =
                            OP(fmadd_ps)(values[i][v], OP(set1_ps)(x[r][i]), acc[r][q][v][i % C]);
            }
            UNROLL for (int r = 0; r < R; r++) x[r] += STEP;
        }
        UNROLL for (int q = 0; q < P; q++) UNROLL for (int v = 0; v < VECTORS; v++)
        {
            const int64_t of_group = ((p + q) * w->groups + g) * PANEL + v * LANES;
            const VECTOR scale = NAME(scale_of)(w, of_group);
            UNROLL for (int r = 0; r < R; r++)
            {
                const VECTOR value = C == 2 ? OP(add_ps)(acc[r][q][v][0], acc[r][q][v][1]) : acc[r][q][v][0];
                sum[r][q][v] = OP(fmadd_ps)(value, scale, sum[r][q][v]);
                if (w->offset)
                    sum[r][q][v] = OP(fmadd_ps)(OP(loadu_ps)(w->offset + of_group),
                        OP(set1_ps)(j->sums[(m + r) * w->groups + g]), sum[r][q][v]);
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int q = 0; q < P; q++)
        NAME(finish)(j, p + q, m + r, sum[r][q]);
}

INLINE TARGET void NAME(few)(const struct job *j, int64_t start, int64_t stop, const int kind)
{
    int64_t p = start;
    for (; p + PANELS <= stop; p += PANELS) {
        int64_t m = 0;
        for (; m + 4 <= j->rows; m += 4)
            NAME(few_tile)(j, p, m, PANELS, 4, kind);
        for (; m + 2 <= j->rows; m += 2)
            NAME(few_tile)(j, p, m, PANELS, 2, kind);
        for (; m < j->rows; m++)
            NAME(few_tile)(j, p, m, PANELS, 1, kind);
    }
    for (; p < stop; p++)
        for (int64_t m = 0; m < j->rows; m++)
            NAME(few_tile)(j, p, m, 1, 1, kind);
}

/* Weights of inputs k to stop of a panel without their factor, [stop - k][16]. */
INLINE TARGET void NAME(decode_block)(const struct weight *w, int64_t p, int64_t k, int64_t stop,
    const int kind, float (*to)[PANEL])
{
    const int bytes = kind == CODING_TABLE ? PANEL / 2 : PANEL;
    const uint8_t *at = codes_at(w, p, k);
    VECTOR scale[VECTORS], offset[VECTORS];
    for (int64_t g = k / w->held, end; k < stop; g++) {
        end = (g + 1) * w->held < stop ? (g + 1) * w->held : stop;
        UNROLL for (int v = 0; v < VECTORS; v++)
        {
            const int64_t of_group = (p * w->groups + g) * PANEL + v * LANES;
            scale[v] = NAME(scale_of)(w, of_group);
            offset[v] = w->offset ? OP(loadu_ps)(w->offset + of_group) : OP(setzero_ps)();
        }
        for (; k < end; k += STEP, at += STEP * bytes, to += STEP) {
            VECTOR values[STEP][VECTORS];
            NAME(decode)(at, kind, w->table, values);
            UNROLL for (int i = 0; i < STEP; i++) UNROLL for (int v = 0; v < VECTORS; v++)
                OP(storeu_ps)(to[i] + v * LANES, OP(fmadd_ps)(values[i][v], scale[v], offset[v]));
        }
    }
}

/* sum += x times values, for R rows: [R][PANELS][16]. */
INLINE TARGET void NAME(multiply)(const float *x, int64_t count, float (*values)[BLOCK][PANEL],
    float (*sum)[PANELS][PANEL], const int R)
{
    VECTOR acc[TILE_ROWS][PANELS][VECTORS];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int q = 0; q < PANELS; q++)
        UNROLL for (int v = 0; v < VECTORS; v++)
            acc[r][q][v] = OP(loadu_ps)(sum[r][q] + v * LANES);
    for (int64_t k = 0; k < count; k++, x += R) {
        VECTOR weight[PANELS][VECTORS];
        UNROLL for (int q = 0; q < PANELS; q++) UNROLL for (int v = 0; v < VECTORS; v++)
            weight[q][v] = OP(loadu_ps)(values[q][k] + v * LANES);
        UNROLL for (int r = 0; r < R; r++)
        {
            const VECTOR one = OP(set1_ps)(x[r]);
            UNROLL for (int q = 0; q < PANELS; q++) UNROLL for (int v = 0; v < VECTORS; v++)
                acc[r][q][v] = OP(fmadd_ps)(weight[q][v], one, acc[r][q][v]);
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int q = 0; q < PANELS; q++)
        UNROLL for (int v = 0; v < VECTORS; v++)
            OP(storeu_ps)(sum[r][q] + v * LANES, acc[r][q][v]);
}

TARGET static void NAME(multiply_tile)(const float *x, int64_t count, float (*values)[BLOCK][PANEL],
    float (*sum)[PANELS][PANEL], int64_t rows)
{
    switch (rows) {
    case TILE_ROWS: NAME(multiply)(x, count, values, sum, TILE_ROWS); break;
#if TILE_ROWS > 8
    case 8: NAME(multiply)(x, count, values, sum, 8); break;
#endif
    case 4: NAME(multiply)(x, count, values, sum, 4); break;
    case 2: NAME(multiply)(x, count, values, sum, 2); break;
    default: NAME(multiply)(x, count, values, sum, 1); break;
    }
}

INLINE TARGET void NAME(many)(const struct job *j, int64_t start, int64_t stop, const int kind)
{
    const struct weight *w = &j->w;
    float values[PANELS][BLOCK][PANEL], sum[ROWS_AT_ONCE][PANELS][PANEL];
    for (int64_t p = start; p < stop; p += PANELS) {
        const int panels = p + PANELS <= stop ? PANELS : 1;
        memset(sum, 0, (size_t)j->rows * sizeof *sum);
        if (panels < PANELS)
            memset(values, 0, sizeof values);
        for (int64_t k = 0, end; k < padded(w); k = end) {
            end = k + BLOCK < padded(w) ? k + BLOCK : padded(w);
            for (int q = 0; q < panels; q++)
                NAME(decode_block)(w, p + q, k, end, kind, values[q]);
            for (int64_t m = 0, rows; m < j->rows; m += rows) {
                rows = rows_of_tile(j->rows - m, TILE_ROWS);
                NAME(multiply_tile)(tile_at(j, m) + k * rows, end - k, values, sum + m, rows);
            }
        }
        for (int q = 0; q < panels; q++)
            for (int64_t m = 0; m < j->rows; m++) {
                VECTOR total[VECTORS];
                UNROLL for (int v = 0; v < VECTORS; v++) total[v] = OP(loadu_ps)(sum[m][q] + v * LANES);
                NAME(finish)(j, p + q, m, total);
            }
    }
}

#define DEFINE(kind)                                                                       \
    TARGET static void NAME(few_##kind)(const struct job *j, int64_t start, int64_t stop)  \
    {                                                                                      \
        NAME(few)(j, start, stop, kind);                                                   \
    }                                                                                      \
    TARGET static void NAME(many_##kind)(const struct job *j, int64_t start, int64_t stop) \
    {                                                                                      \
        NAME(many)(j, start, stop, kind);                                                  \
    }
DEFINE(0)
DEFINE(1)
DEFINE(2)
DEFINE(3)

TARGET static void NAME(tile_all)(const struct job *j, int64_t start, int64_t stop)
{
    tile_rows(j, start, stop, TILE_ROWS);
}

#undef DEFINE
#undef LANES
#undef PANELS
#undef VECTORS
#undef TILE_ROWS
#undef TARGET
#undef NAME
#undef VECTOR
#undef OP

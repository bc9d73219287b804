/* AMX: many rows. Part of low_bit_blocks.c. */

#define TILE 16
/* inputs of a block in one part; with more parts it has fewer inputs, so that both stay in the L1 cache */
#define WEIGHTS_AT_ONCE 384
#define FOR_AMX FOR_CPU("avx2,fma,f16c,avx512f,avx512bw,avx512vl,amx-tile,amx-bf16")

/* Tiles 0 to 3 hold sums of two tiles of rows times two panels, 4 and 5 are of x, 6 and 7 are of weights. */
INLINE FOR_AMX void configure(int64_t rows)
{
    struct tiles t = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        t.bytes[i] = 64;
        t.rows[i] = (uint8_t)(i < 6 && rows < TILE ? rows : TILE);
    }
    WRITTEN();
    _tile_loadconfig(&t);
}

/* The number of bf16 nearest to each of 16 numbers, in the high half. */
INLINE FOR_AMX __m512i nearest_bf16(__m512 value)
{
    const __m512i bits = _mm512_add_epi32(_mm512_castps_si512(value), _mm512_set1_epi32(0x8000));
    return _mm512_and_si512(bits, _mm512_set1_epi32((int)0xffff0000));
}

/* Part `part` of so many of each value; what is left of it stays. The last one holds all that is left, where
 * it is not `rounded`. */
INLINE FOR_AMX __m512i part_of(__m512 *value, const int part, const int parts, const int rounded)
{
    const __m512i found = part < parts - 1 || rounded ? nearest_bf16(*value) : _mm512_castps_si512(*value);
    *value = _mm512_sub_ps(*value, _mm512_castsi512_ps(found));
    return found;
}

/* Rows in parts, zeros behind the last one. */
FOR_AMX static void split_rows(const struct job *j, int64_t start, int64_t stop)
{
    const int64_t inputs = padded(&j->w), across = (inputs + 31) / 32 * 32;
    for (int64_t m = start; m < (stop < j->rows ? stop : (j->rows + TILE - 1) / TILE * TILE); m++) {
        const float *x = m < j->rows ? row_of(j, m) : NULL;
        __m512 amax = _mm512_setzero_ps();
        __mmask16 odd = 0; /* infinite, or not a number */
        for (int64_t k = 0; k < across; k += 32) {
            uint16_t *to = j->halves + m / TILE * TILE * across + k * TILE + m % TILE * 32;
            for (int h = 0; h < 2; h++) {
                const int64_t left = x ? inputs - k - 16 * h : 0;
                const __mmask16 mask = left >= 16 ? 0xffff : left > 0 ? (__mmask16)((1u << left) - 1) : 0;
                __m512 value = mask ? _mm512_maskz_loadu_ps(mask, x + k + 16 * h) : _mm512_setzero_ps();
                const __m512 size = _mm512_abs_ps(value);
                amax = _mm512_max_ps(amax, size);
                odd |= _mm512_cmp_ps_mask(size, _mm512_set1_ps(MOST_FOR_TILES), _CMP_NLE_UQ);
                for (int part = 0; part < j->parts; part++) {
                    const __m512i found = _mm512_srli_epi32(part_of(&value, part, j->parts, 0), 16);
                    _mm256_storeu_si256((__m256i *)(to + part * j->plane + 16 * h),
                        _mm512_cvtepi32_epi16(found));
                }
            }
        }
        const float most = _mm512_reduce_max_ps(amax);
        if (odd || (most > 0 && most < LEAST_FOR_TILES)) {
            *j->unfit = 1;
            return;
        }
    }
}

/* Weights of inputs k to stop of a panel without their factor, in parts:
 * [parts][(stop - k) / 2][16 outputs][2], zeros up to a multiple of 32. */
INLINE FOR_AMX void decode_parts(const struct weight *w, int64_t p, int64_t k, int64_t stop, const int kind,
    const int parts, const int rounded, uint16_t *to)
{
    const int bytes = kind == CODING_TABLE ? PANEL / 2 : PANEL;
    const uint8_t *at = codes_at(w, p, k);
    const int64_t count = stop - k, across = (count + 31) / 32 * 32, block = WEIGHTS_AT_ONCE / parts;
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    for (int part = 0; part < parts; part++)
        memset(to + (part * block + count) * PANEL, 0, (size_t)(across - count) * PANEL * sizeof *to);
    for (int64_t g = k / w->held, end; k < stop; g++) {
        const int64_t of_group = (p * w->groups + g) * PANEL;
        const __m512 scale = scale_of_512(w, of_group),
            offset = w->offset ? _mm512_loadu_ps(w->offset + of_group) : _mm512_setzero_ps();
        end = (g + 1) * w->held < stop ? (g + 1) * w->held : stop;
        for (; k < end; k += STEP, at += STEP * bytes) {
            __m512 values[STEP][1];
            decode_512(at, kind, w->table, values);
            UNROLL for (int i = 0; i < STEP; i += 2)
            {
                __m512 first = _mm512_fmadd_ps(values[i][0], scale, offset),
                    second = _mm512_fmadd_ps(values[i + 1][0], scale, offset);
                UNROLL for (int part = 0; part < parts; part++)
                {
                    const __m512i low = _mm512_srli_epi32(part_of(&first, part, parts, rounded), 16);
                    const __m512i both =
                        _mm512_or_si512(low, _mm512_and_si512(part_of(&second, part, parts, rounded), high));
                    _mm512_storeu_si512(to + part * block * PANEL, both);
                }
                to += 2 * PANEL;
            }
        }
    }
}

/* Products of `count` inputs of one or two tiles of rows and two panels, added to their sums. */
INLINE FOR_AMX void multiply_parts(const struct job *j, const uint16_t *x, int64_t count,
    uint16_t (*weights)[WEIGHTS_AT_ONCE * PANEL], float (*sum)[ROWS_AT_ONCE * PANEL], int64_t m,
    const int parts, const int of_x, const int two)
{
    const int64_t block = WEIGHTS_AT_ONCE / parts, next = TILE * ((padded(&j->w) + 31) / 32 * 32);
    _tile_loadd(0, sum[0] + m * PANEL, 64);
    _tile_loadd(1, sum[1] + m * PANEL, 64);
    if (two) {
        _tile_loadd(2, sum[0] + (m + TILE) * PANEL, 64);
        _tile_loadd(3, sum[1] + (m + TILE) * PANEL, 64);
    }
    for (int64_t k = 0; k < count; k += 32)
        UNROLL for (int part = 0; part < parts; part++)
        {
            _tile_loadd(6, weights[0] + (part * block + k) * PANEL, 64);
            _tile_loadd(7, weights[1] + (part * block + k) * PANEL, 64);
            UNROLL for (int i = 0; i < of_x; i++)
            {
                if (i + part >= MOST_PARTS)
                    continue;
                _tile_loadd(4, x + i * j->plane + k * TILE, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                if (two) {
                    _tile_loadd(5, x + i * j->plane + k * TILE + next, 64);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
            }
        }
    _tile_stored(0, sum[0] + m * PANEL, 64);
    _tile_stored(1, sum[1] + m * PANEL, 64);
    if (two) {
        _tile_stored(2, sum[0] + (m + TILE) * PANEL, 64);
        _tile_stored(3, sum[1] + (m + TILE) * PANEL, 64);
    }
}

/* Panels in pairs: each block of weights becomes `parts` numbers of bf16, which all rows multiply. */
INLINE FOR_AMX void multiply_tiles(const struct job *j, int64_t start, int64_t stop, const int kind,
    const int parts, const int of_x, const int rounded)
{
    const struct weight *w = &j->w;
    const int64_t inputs = padded(w), across = (inputs + 31) / 32 * 32, block = WEIGHTS_AT_ONCE / parts;
    _Alignas(64) uint16_t weights[2][WEIGHTS_AT_ONCE * PANEL] = {{0}};
    _Alignas(64) float sum[2][ROWS_AT_ONCE * PANEL];
    configure(j->rows);
    for (int64_t p = start; p < stop; p += 2) {
        const int panels = p + 2 <= stop ? 2 : 1;
        for (int q = 0; q < 2; q++)
            memset(sum[q], 0, (size_t)((j->rows + TILE - 1) / TILE * TILE * PANEL) * sizeof *sum[q]);
        for (int64_t k = 0, end; k < inputs; k = end) {
            const uint16_t *x = j->halves + k * TILE;
            int64_t m = 0;
            end = k + block < inputs ? k + block : inputs;
            for (int q = 0; q < panels; q++)
                decode_parts(w, p + q, k, end, kind, parts, rounded, weights[q]);
            WRITTEN();
            for (; m + TILE < j->rows; m += 2 * TILE)
                multiply_parts(j, x + m * across, end - k, weights, sum, m, parts, of_x, 1);
            if (m < j->rows)
                multiply_parts(j, x + m * across, end - k, weights, sum, m, parts, of_x, 0);
            WRITTEN();
        }
        for (int q = 0; q < panels; q++)
            for (int64_t m = 0; m < j->rows; m++) {
                const __m512 total = _mm512_load_ps(sum[q] + m * PANEL);
                finish_512(j, p + q, m, &total);
            }
    }
    _tile_release();
}

#define DEFINE(kind)                                                                    \
    FOR_AMX static void tiles_##kind(const struct job *j, int64_t start, int64_t stop)  \
    {                                                                                   \
        if (j->parts == 1)                                                              \
            multiply_tiles(j, start, stop, kind, 1, 1, 1);                              \
        else if (j->w.parts == 1)                                                       \
            multiply_tiles(j, start, stop, kind, 1, 3, 0);                              \
        else if (j->w.parts == 2)                                                       \
            multiply_tiles(j, start, stop, kind, 2, 3, 0);                              \
        else                                                                            \
            multiply_tiles(j, start, stop, kind, 3, 3, 0);                              \
    }
DEFINE(0)
DEFINE(1)
DEFINE(2)
DEFINE(3)
#undef DEFINE
static const part_t tiles_of[KINDS] = {tiles_0, tiles_1, tiles_2, tiles_3};

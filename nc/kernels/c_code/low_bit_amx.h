/* AMX: many rows of low-bit linears. Part of low_bit.c, whose forms int8, digits and bf16 it computes with
 * tiles of 16 rows times 16 outputs.
 *
 * Codes become signed bytes (or bf16) in a buffer that stays in the L1 cache, for two panels and `CHUNK`
 * input channels at a time; all rows multiply them before the next ones. Sums of int8 products are as exact
 * as those of VNNI, and are scaled and added in the same order, so that results are equal bit for bit.
 */

#define TILE 16
#define AMX_ROWS_AT_ONCE 256 /* sums of so many rows are on the stack: 32 KB */
#define CHUNK 512            /* input channels that are unpacked at once; no block is longer */
#define FOR_AMX FOR_CPU("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16,amx-tile,amx-int8,amx-bf16")

_Static_assert(CHUNK % 64 == 0 && AMX_ROWS_AT_ONCE % TILE == 0, "pieces and tiles are whole");

/* Tiles 0 to 5 hold sums, 6 is of x, 7 of codes; `bytes` of each row of x are multiplied at once. */
INLINE FOR_AMX void configure(int64_t rows, int bytes)
{
    struct tiles t = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        t.bytes[i] = i == 6 ? (uint16_t)bytes : 64;
        t.rows[i] = (uint8_t)(i == 7 ? bytes / 4 : rows < TILE ? rows : TILE);
    }
    WRITTEN();
    _tile_loadconfig(&t);
}

/* Signed bytes of input channels from k to stop of a panel: [(stop - k) / 4][16 outputs][4]. */
INLINE FOR_AMX void unpack_bytes(const struct weight *w, int64_t p, int64_t k, int64_t stop, int8_t *to,
    const int bits)
{
    const __m512i half = _mm512_set1_epi8(15), middle = _mm512_set1_epi8((char)w->middle);
    const uint8_t *at = w->codes + (p * w->padded + k) * 2 * bits;
    for (; k < stop; k += 8, at += 16 * bits, to += 128) {
        __m512i low = _mm512_loadu_si512(at), high;
        if (bits == 4) {
            high = _mm512_and_si512(_mm512_srli_epi32(low, 4), half);
            low = _mm512_and_si512(low, half);
        } else {
            high = _mm512_loadu_si512(at + 64);
        }
        _mm512_store_si512(to, _mm512_sub_epi8(low, middle));
        _mm512_store_si512(to + 64, _mm512_sub_epi8(high, middle));
    }
}

/* What scales the sums of a block, one for each output of two panels. */
struct scales {
    _Alignas(64) float by[2][PANEL], offset[2][PANEL];
    int adds; /* a group with offsets ends here */
};

/* sum += acc * x's scale * the weight's scale, for a tile; where a group ends, its offset times the sum of x.
 * Digit d of panel v: acc[2 d + v]. */
INLINE FOR_AMX void add_block(const float *by, const float *group_sum, const struct scales *scales,
    const int v, int32_t acc[][TILE * PANEL], float *sum, const int D)
{
    const __m512 scale = _mm512_load_ps(scales->by[v]), offset = _mm512_load_ps(scales->offset[v]);
    /* one register for each: compilers like to compute the addresses of all rows instead */
    __asm__("" : "+r"(by), "+r"(sum));
    UNROLL for (int r = 0; r < TILE; r++)
    {
        __m512 value = _mm512_cvtepi32_ps(_mm512_load_si512(acc[2 * (D - 1) + v] + r * PANEL));
        UNROLL for (int d = D - 2; d >= 0; d--)
            value = _mm512_fmadd_ps(value, _mm512_set1_ps(256),
                _mm512_cvtepi32_ps(_mm512_load_si512(acc[2 * d + v] + r * PANEL)));
        value = _mm512_fmadd_ps(_mm512_mul_ps(value, _mm512_set1_ps(by[r])), scale,
            _mm512_load_ps(sum + r * PANEL));
        _mm512_store_ps(sum + r * PANEL, value);
    }
    if (scales->adds)
        UNROLL for (int r = 0; r < TILE; r++)
            _mm512_store_ps(sum + r * PANEL,
                _mm512_fmadd_ps(offset, _mm512_set1_ps(group_sum[r]), _mm512_load_ps(sum + r * PANEL)));
}

/* Products of input channels from k to stop, into tiles 2 d and 2 d + 1 for digit d; `codes` begin with those
 * of channel `from`. */
INLINE FOR_AMX void multiply(const int8_t *x, int64_t plane, const int8_t *codes, int64_t from, int64_t k,
    int64_t stop, const int step, const int D)
{
#define MULTIPLY(d, left, right)                                               \
    _tile_zero(left);                                                          \
    _tile_zero(right);                                                         \
    for (int64_t i = k; i < stop; i += step) {                                 \
        const int8_t *of_codes = codes + (i - from) * PANEL;                   \
        _tile_loadd(6, x + (d) * TILE * plane + i / 64 * 1024 + i % 64, 64);   \
        _tile_loadd(7, of_codes, 64);                                          \
        _tile_dpbssd(left, 6, 7);                                              \
        _tile_loadd(7, of_codes + CHUNK * PANEL, 64);                          \
        _tile_dpbssd(right, 6, 7);                                             \
    }
    MULTIPLY(0, 0, 1)
    if (D > 1) {
        MULTIPLY(1, 2, 3)
        MULTIPLY(2, 4, 5)
    }
}

INLINE FOR_AMX void store(int32_t acc[][TILE * PANEL], const int D)
{
    _tile_stored(0, acc[0], 64);
    _tile_stored(1, acc[1], 64);
    if (D > 1) {
        _tile_stored(2, acc[2], 64);
        _tile_stored(3, acc[3], 64);
        _tile_stored(4, acc[4], 64);
        _tile_stored(5, acc[5], 64);
    }
}

INLINE FOR_AMX void integers_amx(const struct job *j, int64_t start, int64_t stop, const int bits,
    const int D)
{
    const int64_t groups = j->w.padded / j->w.group, each = j->blocks / groups, at_once = CHUNK / j->block,
        block = j->block;
    const int64_t many = j->rows;
    const int step = block % 64 || j->w.padded % 64 ? 32 : 64; /* the last block may be shorter */
    _Alignas(64) int8_t codes[2 * CHUNK * PANEL];
    _Alignas(64) float sum[2][AMX_ROWS_AT_ONCE * PANEL];
    _Alignas(64) int32_t acc[2 * DIGITS][TILE * PANEL] = {0};
    struct scales scales[CHUNK / 32];
    configure(many, step);
    for (int64_t p = start; p < stop; p += 2) {
        const int two = p + 1 < stop;
        for (int v = 0; v < 2; v++)
            memset(sum[v], 0, sizeof(float) * PANEL * ((many + TILE - 1) / TILE * TILE));
        for (int64_t first = 0; first < j->blocks; first += at_once) {
            const int64_t last = first + at_once < j->blocks ? first + at_once : j->blocks,
                from = first * block;
            const int64_t to = last * block < j->w.padded ? last * block : j->w.padded;
            for (int v = 0; v <= two; v++) {
                unpack_bytes(&j->w, p + v, from, to, codes + v * CHUNK * PANEL, bits);
                for (int64_t b = first; b < last; b++) {
                    const int64_t at = ((p + v) * groups + b / each) * PANEL;
                    struct scales *s = scales + b - first;
                    s->adds = j->w.offset && (b + 1) % each == 0;
                    _mm512_store_ps(s->by[v], scales_512(&j->w, at));
                    _mm512_store_ps(s->offset[v],
                        s->adds ? _mm512_loadu_ps(j->w.offset + at) : _mm512_setzero_ps());
                }
            }
            WRITTEN();
            for (int64_t m = 0; m < many; m += TILE) {
                const int8_t *x = codes_at(j, m, 0, 0);
                const float *by = j->block_scale + m + first * j->held;
                float *left = sum[0] + m * PANEL, *right = sum[1] + m * PANEL;
                /* sums of a block are scaled while tiles multiply the next one */
                for (int64_t b = 0; b <= last - first; b++) {
                    if (b)
                        store(acc, D);
                    if (b < last - first) {
                        const int64_t k = from + b * block, end = k + block < to ? k + block : to;
                        multiply(x, j->plane, codes, from, k, end, step, D);
                    }
                    if (b) {
                        const struct scales *before = scales + b - 1;
                        const float *group_sum =
                            before->adds ? j->group_sums + m + (first + b - 1) / each * j->held : NULL;
                        add_block(by + (b - 1) * j->held, group_sum, before, 0, acc, left, D);
                        if (two)
                            add_block(by + (b - 1) * j->held, group_sum, before, 1, acc, right, D);
                    }
                }
            }
        }
        for (int v = 0; v <= two; v++)
            for (int64_t m = 0; m < many; m++)
                finish_512(j, p + v, m, _mm512_load_ps(sum[v] + m * PANEL));
    }
    _tile_release();
}

/* Codes of input channels from k to stop of a panel in bf16, in pairs as `order_rows` puts x:
 * [(stop - k) / 2][16 outputs][2]. */
INLINE FOR_AMX void unpack_bf16(const struct weight *w, int64_t p, int64_t k, int64_t stop, uint16_t *to)
{
    const __m256i values = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_loadu_si512(w->table), 16));
    const __m512i table = _mm512_broadcast_i64x4(values);
    const uint8_t *at = w->codes + (p * w->padded + k) * 8;
    for (; k < stop; k += 8, at += 64, to += 128) {
        __m512i found = _mm512_loadu_si512(at);
        UNROLL for (int i = 0; i < 4; i++)
            _mm512_store_si512(to + 32 * i, _mm512_permutexvar_epi16(_mm512_srli_epi16(found, 4 * i), table));
    }
}

FOR_AMX static void bf16_4_amx(const struct job *j, int64_t start, int64_t stop)
{
    const int64_t groups = j->w.padded / j->w.group, group = j->w.group, many = j->rows;
    _Alignas(64) uint16_t codes[2 * CHUNK * PANEL];
    _Alignas(64) float sum[2][AMX_ROWS_AT_ONCE * PANEL];
    _Alignas(64) float acc[2][TILE * PANEL] = {0};
    configure(many, 64);
    for (int64_t p = start; p < stop; p += 2) {
        const int two = p + 1 < stop;
        for (int v = 0; v < 2; v++)
            memset(sum[v], 0, sizeof(float) * PANEL * ((many + TILE - 1) / TILE * TILE));
        for (int64_t from = 0, to; from < j->w.padded; from = to) {
            /* groups that fit, or a part of one */
            const int64_t whole = (from / group + CHUNK / group) * group, end = (from / group + 1) * group;
            to = whole > from ? whole : from + CHUNK < end ? from + CHUNK : end;
            to = to < j->w.padded ? to : j->w.padded;
            for (int v = 0; v <= two; v++)
                unpack_bf16(&j->w, p + v, from, to, codes + v * CHUNK * PANEL);
            WRITTEN();
            for (int64_t m = 0; m < many; m += TILE) {
                const int8_t *x = codes_at(j, m, 0, 0);
                for (int64_t k = from, g = from / group; k < to; g++) {
                    const int64_t stop_k = (g + 1) * group < to ? (g + 1) * group : to;
                    _tile_zero(0);
                    _tile_zero(1);
                    for (; k < stop_k; k += 32) {
                        _tile_loadd(6, x + k / 32 * 1024, 64);
                        _tile_loadd(7, codes + (k - from) * PANEL, 64);
                        _tile_dpbf16ps(0, 6, 7);
                        _tile_loadd(7, codes + (CHUNK + k - from) * PANEL, 64);
                        _tile_dpbf16ps(1, 6, 7);
                    }
                    _tile_stored(0, acc[0], 64);
                    _tile_stored(1, acc[1], 64);
                    for (int v = 0; v <= two; v++) {
                        const int64_t at = ((p + v) * groups + g) * PANEL;
                        const __m512 scale = scales_512(&j->w, at);
                        float *s = sum[v] + m * PANEL;
                        UNROLL for (int r = 0; r < TILE; r++)
                            _mm512_store_ps(s + r * PANEL,
                                _mm512_fmadd_ps(_mm512_load_ps(acc[v] + r * PANEL), scale,
                                    _mm512_load_ps(s + r * PANEL)));
                        if (j->w.offset && stop_k == (g + 1) * group) {
                            const __m512 offset = _mm512_loadu_ps(j->w.offset + at);
                            const float *group_sum = j->group_sums + m + g * j->held;
                            UNROLL for (int r = 0; r < TILE; r++)
                                _mm512_store_ps(s + r * PANEL,
                                    _mm512_fmadd_ps(offset, _mm512_set1_ps(group_sum[r]),
                                        _mm512_load_ps(s + r * PANEL)));
                        }
                    }
                }
            }
        }
        for (int v = 0; v <= two; v++)
            for (int64_t m = 0; m < many; m++)
                finish_512(j, p + v, m, _mm512_load_ps(sum[v] + m * PANEL));
    }
    _tile_release();
}

FOR_AMX static void int8_4_amx(const struct job *j, int64_t start, int64_t stop)
{
    integers_amx(j, start, stop, 4, 1);
}
FOR_AMX static void int8_8_amx(const struct job *j, int64_t start, int64_t stop)
{
    integers_amx(j, start, stop, 8, 1);
}
FOR_AMX static void digits_4_amx(const struct job *j, int64_t start, int64_t stop)
{
    integers_amx(j, start, stop, 4, DIGITS);
}
FOR_AMX static void digits_8_amx(const struct job *j, int64_t start, int64_t stop)
{
    integers_amx(j, start, stop, 8, DIGITS);
}

/* Attention in fp32 with AVX-512: softmax(q K^T * factor + mask) V. With `bf16` all that the two products read
 * and give is rounded to bf16, and what they give is in fp32 again.
 *
 * A few rows of the scores are computed at a time, so they stay in the first cache. Keys and values of a head
 * are copied once: 16 keys side by side, and values without the gaps between their rows.
 */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "calls.h"
#include "isa.h"
#include "openmp.h"

#define FOR_AVX512 FOR_CPU("avx512f,avx512bw,avx512vl,avx2,fma")
#include "attention.h"
#include "bf16.h"
#include "exponential.h"
#include "transpose.h"
#define UNROLL _Pragma("GCC unroll 6")

/* Panels of 16 columns whose sums are in registers, of FLOAT_ROWS rows. */
enum { PANELS_AT_ONCE = 4 };
_Static_assert(FLOAT_ROWS == 6, "attend_some has a case for each number of rows");

struct job {
    const struct nc_float_attention *how;
    char *const *tensors;
};

/* Memory of one thread: keys [keys / 16][width][16], values [keys][wide, filled up], some rows of scores and of
 * queries. */
struct room {
    float *keys, *values, *scores, *queries;
};

static struct room room_of(char *memory, const struct nc_float_attention *how)
{
    const int64_t keys = up(how->keys, 16);
    struct room room = {.keys = (float *)memory};
    room.values = room.keys + keys * how->width;
    room.scores = room.values + keys * up(how->wide, 16);
    room.queries = room.scores + keys * FLOAT_ROWS;
    return room;
}

/* Bytes of it. */
static int64_t bytes_of_room(const struct nc_float_attention *how)
{
    const int64_t of_keys = how->width + up(how->wide, 16) + FLOAT_ROWS;
    return (up(how->keys, 16) * of_keys + up(how->width, 16) * FLOAT_ROWS) * 4;
}

FOR_AVX512 static void pack(const struct nc_float_attention *how, const float *k, const float *v,
    const struct room *room)
{
    const int64_t wide = up(how->wide, 16), step = how->k_strides[2];
    for (int64_t key = 0; key < how->keys; key += 16)
        for (int64_t t = 0; t < how->width; t += 16) {
            __m512 x[16];
            for (int i = 0; i < 16; i++)
                x[i] = key + i < how->keys
                    ? _mm512_maskz_loadu_ps(lanes_of(how->width - t), k + (key + i) * step + t)
                    : _mm512_setzero_ps();
            transpose(x);
            for (int64_t i = 0; i < 16 && t + i < how->width; i++)
                _mm512_storeu_ps(room->keys + key * how->width + (t + i) * 16,
                    how->bf16 ? near_bf16(x[i]) : x[i]);
        }
    for (int64_t key = 0; key < how->keys; key++)
        for (int64_t i = 0; i < wide; i += 16) {
            const __m512 x = _mm512_maskz_loadu_ps(lanes_of(how->wide - i), v + key * how->v_strides[2] + i);
            _mm512_storeu_ps(room->values + key * wide + i, how->bf16 ? near_bf16(x) : x);
        }
}

/* y[r][column] = sum over n of x[r][n] * w[n][column], for some rows and panels of 16 columns: w is a panel
 * behind the other, `panel` apart, with `line` numbers from one n to the next. */
INLINE FOR_AVX512 void multiply(const int rows, const int panels, const float *const *x, int64_t n,
    const float *w, int64_t panel, int64_t line, float *y, int64_t y_row)
{
    __m512 sums[FLOAT_ROWS][PANELS_AT_ONCE];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < panels; c++)
            sums[r][c] = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i++) {
        __m512 right[PANELS_AT_ONCE];
        UNROLL for (int c = 0; c < panels; c++)
            right[c] = _mm512_loadu_ps(w + c * panel + i * line);
        UNROLL for (int r = 0; r < rows; r++)
        {
            const __m512 left = _mm512_set1_ps(x[r][i]);
            UNROLL for (int c = 0; c < panels; c++)
                sums[r][c] = _mm512_fmadd_ps(left, right[c], sums[r][c]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < panels; c++)
            _mm512_storeu_ps(y + r * y_row + c * 16, sums[r][c]);
}

/* All panels of some rows. */
INLINE FOR_AVX512 void multiply_all(const int rows, const float *const *x, int64_t n, const float *w,
    int64_t panels, int64_t panel, int64_t line, float *y, int64_t y_row)
{
    int64_t done = 0;
    for (; done + PANELS_AT_ONCE <= panels; done += PANELS_AT_ONCE)
        multiply(rows, PANELS_AT_ONCE, x, n, w + done * panel, panel, line, y + done * 16, y_row);
    for (; done < panels; done++)
        multiply(rows, 1, x, n, w + done * panel, panel, line, y + done * 16, y_row);
}

/* 16 scores of a row: products * factor + mask. */
INLINE FOR_AVX512 __m512 score_of(const struct job *job, const char *mask, int64_t key, int64_t seen, __m512 x)
{
    const struct nc_float_attention *how = job->how;
    if (how->bf16)
        x = near_bf16(x);
    x = _mm512_mul_ps(x, _mm512_set1_ps((float)how->factor));
    return masked(how->mask, mask, how->mask_strides[3], key, seen - key, x);
}

/* e^(scores - the largest one) of one row, and 1 / their sum. A row that sees no key gets zeros, as from
 * torch. */
INLINE FOR_AVX512 float exponentials(const struct job *job, const char *mask, int64_t seen, int64_t keys,
    float *scores)
{
    __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    __mmask16 unknown = 0; /* scores that are no number */
    for (int64_t i = 0; i < keys; i += 16) {
        const __m512 x = score_of(job, mask, i, seen, _mm512_loadu_ps(scores + i));
        unknown |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        most = _mm512_max_ps(x, most);
        _mm512_storeu_ps(scores + i, x);
    }
    const float largest = _mm512_reduce_max_ps(most);
    if (largest == -INFINITY && !unknown) {
        memset(scores, 0, (size_t)keys * 4);
        return 0;
    }
    for (int64_t i = 0; i < keys; i += 16) {
        const __m512 x = _mm512_loadu_ps(scores + i);
        const __m512 e = exponential_of_16(_mm512_sub_ps(x, _mm512_set1_ps(largest)));
        /* not e^-87 */
        const __m512 some = _mm512_maskz_mov_ps(
            _mm512_cmp_ps_mask(x, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ), e);
        sum = _mm512_add_ps(sum, some);
        _mm512_storeu_ps(scores + i, some);
    }
    const float inverse = 1 / _mm512_reduce_add_ps(sum);
    if (!job->how->bf16)
        return inverse;
    for (int64_t i = 0; i < keys; i += 16) {
        const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(scores + i), _mm512_set1_ps(inverse));
        _mm512_storeu_ps(scores + i, near_bf16(x));
    }
    return 1;
}

/* Some rows of one head. */
INLINE FOR_AVX512 void attend(const int rows, const struct job *job, const struct room *room, int64_t batch,
    int64_t head, int64_t row)
{
    const struct nc_float_attention *how = job->how;
    const int64_t wide = up(how->wide, 16), held = up(how->keys, 16);
    const int64_t last = how->causal && row + rows < how->keys ? row + rows : how->keys, keys = up(last, 16);
    const float *q[FLOAT_ROWS], *weights[FLOAT_ROWS];
    float factors[FLOAT_ROWS], sums[FLOAT_ROWS][PANELS_AT_ONCE * 16];
    for (int r = 0; r < rows; r++) {
        q[r] = (const float *)job->tensors[1] + batch * how->q_strides[0] + head * how->q_strides[1]
            + (row + r) * how->q_strides[2];
        weights[r] = room->scores + r * held;
        if (how->bf16) {
            float *rounded = room->queries + r * up(how->width, 16);
            for (int64_t i = 0; i < how->width; i += 16)
                _mm512_storeu_ps(rounded + i,
                    near_bf16(_mm512_maskz_loadu_ps(lanes_of(how->width - i), q[r] + i)));
            q[r] = rounded;
        }
    }
    multiply_all(rows, q, how->width, room->keys, keys / 16, how->width * 16, 16, room->scores, held);
    for (int r = 0; r < rows; r++) {
        const int64_t *steps = how->mask_strides, bytes = how->mask == MASK_FLOAT ? 4 : 1;
        const int64_t at = batch * steps[0] + head * steps[1] + (row + r) * steps[2];
        const char *mask = how->mask == MASK_NONE ? NULL : job->tensors[5] + at * bytes;
        const int64_t seen = how->causal && row + r < last ? row + r + 1 : last;
        factors[r] = exponentials(job, mask, seen, keys, room->scores + r * held);
    }
    for (int64_t column = 0; column < wide; column += PANELS_AT_ONCE * 16) {
        const int64_t panels = wide - column < PANELS_AT_ONCE * 16 ? (wide - column) / 16 : PANELS_AT_ONCE;
        multiply_all(rows, weights, last, room->values + column, panels, 16, wide, sums[0],
            PANELS_AT_ONCE * 16);
        for (int r = 0; r < rows; r++) {
            float *y = (float *)job->tensors[0] + batch * how->y_strides[0] + head * how->y_strides[1]
                + (row + r) * how->y_strides[2] + column;
            const __m512 factor = _mm512_set1_ps(factors[r]);
            for (int64_t i = 0; i < panels * 16; i += 16) {
                __m512 v = _mm512_mul_ps(_mm512_loadu_ps(sums[r] + i), factor);
                if (how->bf16)
                    v = near_bf16(v);
                _mm512_mask_storeu_ps(y + i, lanes_of(how->wide - column - i), v);
            }
        }
    }
}

FOR_AVX512 static void attend_some(int64_t rows, const struct job *job, const struct room *room, int64_t batch,
    int64_t head, int64_t row)
{
    switch (rows) {
    case 1: attend(1, job, room, batch, head, row); break;
    case 2: attend(2, job, room, batch, head, row); break;
    case 3: attend(3, job, room, batch, head, row); break;
    case 4: attend(4, job, room, batch, head, row); break;
    case 5: attend(5, job, room, batch, head, row); break;
    case 6: attend(6, job, room, batch, head, row); break;
    }
}

FOR_AVX512 static void work(void *data, int64_t part, int64_t parts)
{
    const struct job *job = data;
    const struct nc_float_attention *how = job->how;
    const int64_t pieces = how->parts, tasks = how->batch * how->heads * pieces;
    const struct room room = room_of(job->tensors[4] + part * how->bytes, how);
    int64_t packed = -1;
    for (int64_t task = tasks * part / parts; task < tasks * (part + 1) / parts; task++) {
        const int64_t which = task / pieces, batch = which / how->heads, head = which % how->heads,
            piece = task % pieces, shared = which / how->group;
        if (shared != packed) {
            const int64_t of_key = head / how->group;
            pack(how,
                (const float *)job->tensors[2] + batch * how->k_strides[0] + of_key * how->k_strides[1],
                (const float *)job->tensors[3] + batch * how->v_strides[0] + of_key * how->v_strides[1],
                &room);
            packed = shared;
        }
        const int64_t first = how->rows * piece / pieces, rows = how->rows * (piece + 1) / pieces - first;
        const int64_t blocks = (rows + FLOAT_ROWS - 1) / FLOAT_ROWS;
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t row = rows * block / blocks;
            attend_some(rows * (block + 1) / blocks - row, job, &room, batch, head, first + row);
        }
    }
}

/* tensors: y, q, k, v in fp32; memory for all threads, of 64-byte pieces; the mask, bool or fp32 */
int nc_float_attention(const struct nc_float_attention *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_float_attention);
    const struct job job = {how, tensors};
    EXPECT(nc_may_use() >> ISA_AVX512 & 1, NOT_HERE);
    EXPECT(how->mask >= MASK_NONE && how->mask <= MASK_FLOAT, OTHER_OPERATION);
    EXPECT(count == 5 + (how->mask != MASK_NONE), OTHER_TENSORS);
    EXPECT(how->batch >= 0 && how->heads >= 0 && how->rows >= 0 && how->threads > 0, OTHER_SIZE);
    EXPECT(how->group > 0 && how->heads % how->group == 0, OTHER_SIZE);
    EXPECT(how->keys > 0 && how->width > 0 && how->wide > 0 && how->parts > 0, OTHER_SIZE);
    EXPECT(bytes_of_room(how) <= how->bytes, OTHER_SIZE);
    /* as much work as some ten thousand products is done before other threads wake up */
    const int64_t worth =
        1 + how->batch * how->heads * how->rows * how->keys * (how->width + how->wide) / 131072;
    in_parts(work, (void *)&job, worth, how->threads);
    return OK;
}

CODE_FOR(1 << ISA_AVX512)

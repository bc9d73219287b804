/* Some rows of one head of attention.c, for one instruction set: NAMED, OF_WIDTH, FOR_THIS, VECTOR, OF_VECTOR,
 * INTEGERS, OF_INTEGERS, LOADED, STORE, TO_NUMBERS, LEFT, RIGHT, ONES and ADD_PRODUCTS are defined where this is
 * included. It takes away NAMED, LEFT, RIGHT, ONES and ADD_PRODUCTS. */

#define LANES NAMED(LANES)
#define GROUP NAMED(GROUP)
#define AT_ONCE NAMED(BLOCKS_AT_ONCE)
#define WORD ((int64_t)sizeof(INTEGERS)) /* bytes of a group of all outputs of a vector */
#define THIS INLINE FOR_THIS
#include "multiply_codes.h"

/* Keys [keys, width] as [keys / LANES][width / GROUP][LANES][GROUP]; what is missing is 0. */
FOR_THIS static void NAMED(pack_keys)(const struct nc_int8_attention *how, const int8_t *k,
    const struct room *room)
{
    const int64_t width = how->width, groups = up(width, GROUP) / GROUP, zero_q = how->q_zero_point,
        zero_k = how->k_zero_point;
    RIGHT memory[WIDEST_HEAD];
    for (int64_t block = 0; block * LANES < how->keys; block++) {
        char *to = room->keys + block * groups * WORD;
        for (int64_t j = 0; j < LANES; j++) {
            const int64_t key = block * LANES + j;
            if (key >= how->keys) {
                for (int64_t t = 0; t < groups; t++)
                    memset(to + t * WORD + j * 4, 0, 4);
                continue;
            }
            const char *from = NAMED(key)(k + key * how->k_strides[2], width, memory);
            for (int64_t t = 0; t < width / GROUP; t++)
                memcpy(to + t * WORD + j * 4, from + t * 4, 4);
            if (width % GROUP) {
                memset(to + (groups - 1) * WORD + j * 4, 0, 4);
                memcpy(to + (groups - 1) * WORD + j * 4, from + width / GROUP * 4,
                    (size_t)(width % GROUP) * sizeof(RIGHT));
            }
        }
        INTEGERS sums = OF_INTEGERS(set1)(0);
        for (int64_t t = 0; t < groups; t++)
            ADD_PRODUCTS(sums, OF_INTEGERS(set1)(ONES), LOADED(to + t * WORD));
        sums = OF_INTEGERS(mullo)(sums, OF_INTEGERS(set1)((int)-zero_q));
        STORE(room->of_keys + block * LANES,
            OF_INTEGERS(add)(sums, OF_INTEGERS(set1)((int)(width * zero_q * zero_k))));
    }
}

/* Values [keys, wide] as [wide / LANES][keys / GROUP][LANES][GROUP]. */
FOR_THIS static void NAMED(pack_values)(const struct nc_int8_attention *how, const int8_t *v,
    const struct room *room)
{
    const int64_t groups = up(how->keys, LANES) / GROUP;
    for (int64_t column = 0; column < how->wide; column += LANES) {
        char *to = room->values + column / LANES * groups * WORD;
        for (int64_t t = 0; t < groups; t++) {
            __m128i rows[GROUP];
            for (int64_t i = 0; i < GROUP; i++) {
                const int64_t key = t * GROUP + i;
                rows[i] = key < how->keys ? OF_WIDTH(some_codes)((const char *)v + key * how->v_strides[2] + column,
                                                how->wide - column)
                                          : _mm_setzero_si128();
            }
            NAMED(put_group)(to + t * WORD, rows);
        }
    }
}

/* What follows a product: `n` columns of one row. */
THIS void NAMED(follow)(const struct job *job, int64_t first, int64_t count, int64_t batch, int64_t head,
    int64_t row, float *x, int64_t n)
{
    for (int64_t i = first; i < first + count; i++) {
        const int64_t kind = job->how->followers[i], *strides = job->how->follower_strides[i];
        const float *from =
            (const float *)job->tensors[5 + i] + batch * strides[0] + head * strides[1] + row * strides[2];
        for (int64_t j = 0; j < n; j += LANES) {
            const VECTOR y = strides[3] ? OF_WIDTH(some)(from + j, n - j) : OF_VECTOR(set1)(*from);
            const VECTOR old = OF_VECTOR(loadu)(x + j);
            OF_VECTOR(storeu)(x + j, kind == FOLLOW_ADD ? OF_VECTOR(add)(old, y) : OF_VECTOR(mul)(old, y));
        }
    }
}

/* Scores of `rows` rows with `blocks` blocks of keys. `taken`: what the zero point of k takes off each sum of
 * a row. */
THIS void NAMED(score)(const int rows, const int blocks, const struct job *job, const struct room *room,
    const LEFT *q, const int32_t *taken, int64_t block)
{
    const int64_t groups = up(job->how->width, GROUP) / GROUP, keys = up(job->how->keys, LANES);
    const VECTOR factor = OF_VECTOR(set1)((float)job->how->score);
    INTEGERS sums[SCORE_ROWS][AT_ONCE];
    NAMED(multiply)(rows, blocks, q, groups * 4, room->keys + block * groups * WORD, groups * WORD, groups, sums);
    for (int r = 0; r < rows; r++) {
        const INTEGERS off = OF_INTEGERS(set1)(taken[r]);
        for (int c = 0; c < blocks; c++) {
            const INTEGERS exact = OF_INTEGERS(add)(sums[r][c],
                OF_INTEGERS(sub)(LOADED(room->of_keys + (block + c) * LANES), off));
            OF_VECTOR(storeu)(room->scores + r * keys + (block + c) * LANES,
                OF_VECTOR(mul)(TO_NUMBERS(exact), factor));
        }
    }
}

/* Codes from 0 to 255 of values that are multiples of the scale; what is no number becomes 0. */
THIS __m128i NAMED(codes_of)(VECTOR x)
{
    return OF_WIDTH(narrowed)(OF_WIDTH(to_integers)(
        OF_VECTOR(min)(OF_VECTOR(max)(x, OF_VECTOR(setzero)()), OF_VECTOR(set1)(255.0f))));
}

/* Codes of the softmax of `rows` rows of n scores, up to whole vectors, and their sums. Rows do not wait for
 * each other. */
THIS void NAMED(softmax)(const int rows, float *e, LEFT *codes, int64_t n, float inverse, int32_t *total)
{
    const int64_t keys = up(n, LANES), last = keys - LANES;
    VECTOR most[SCORE_ROWS], sum[SCORE_ROWS];
    __m128i sums[SCORE_ROWS];
    for (int r = 0; r < rows; r++) {
        most[r] = OF_WIDTH(first)(OF_VECTOR(loadu)(e + r * keys + last), n - last,
            OF_VECTOR(set1)(-INFINITY));
        OF_VECTOR(storeu)(e + r * keys + last, most[r]);
        sum[r] = OF_VECTOR(setzero)();
        sums[r] = _mm_setzero_si128();
    }
    for (int64_t i = 0; i < last; i += LANES)
        for (int r = 0; r < rows; r++)
            most[r] = OF_VECTOR(max)(most[r], OF_VECTOR(loadu)(e + r * keys + i));
    for (int r = 0; r < rows; r++)
        most[r] = OF_VECTOR(set1)(OF_WIDTH(largest)(most[r]));
    for (int64_t i = 0; i <= last; i += LANES)
        for (int r = 0; r < rows; r++) {
            const VECTOR x =
                OF_WIDTH(exponential)(OF_VECTOR(sub)(OF_VECTOR(loadu)(e + r * keys + i), most[r]));
            OF_VECTOR(storeu)(e + r * keys + i, x);
            sum[r] = OF_VECTOR(add)(sum[r], x);
        }
    for (int r = 0; r < rows; r++)
        sum[r] = OF_VECTOR(set1)(inverse / OF_WIDTH(sum)(sum[r]));
    for (int64_t i = 0; i <= last; i += LANES)
        for (int r = 0; r < rows; r++) {
            const __m128i found = NAMED(codes_of)(OF_VECTOR(mul)(OF_VECTOR(loadu)(e + r * keys + i), sum[r]));
            NAMED(put_left)(codes + r * keys + i, found);
            sums[r] = add_codes(sums[r], found);
        }
    for (int r = 0; r < rows; r++)
        total[r] = total_of(sums[r]);
}

/* Sums of values for `rows` rows and `blocks` blocks of columns, instead of scores. `total`: sums of codes of
 * probabilities. */
THIS void NAMED(weigh)(const int rows, const int blocks, const struct job *job, const struct room *room,
    const int32_t *total, int64_t block)
{
    const int64_t keys = up(job->how->keys, LANES), wide = up(job->how->wide, LANES), groups = keys / GROUP;
    const VECTOR factor = OF_VECTOR(set1)((float)job->how->value);
    INTEGERS sums[SCORE_ROWS][AT_ONCE];
    NAMED(multiply)(rows, blocks, room->codes, groups * 4, room->values + block * groups * WORD, groups * WORD,
        groups, sums);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < blocks; c++) {
            const INTEGERS exact = OF_INTEGERS(sub)(sums[r][c],
                OF_INTEGERS(set1)((int)(job->how->v_zero_point * total[r])));
            OF_VECTOR(storeu)(room->sums + r * wide + (block + c) * LANES,
                OF_VECTOR(mul)(TO_NUMBERS(exact), factor));
        }
}

/* A row of the result: in fp32, or as codes. */
THIS void NAMED(put)(const struct job *job, const float *x, int64_t at)
{
    const struct nc_int8_attention *how = job->how;
    const VECTOR inverse = OF_VECTOR(set1)((float)how->inverse),
                 zero = OF_VECTOR(set1)((float)how->y_zero_point);
    const VECTOR low = OF_VECTOR(sub)(OF_VECTOR(setzero)(), zero),
                 high = OF_VECTOR(sub)(OF_VECTOR(set1)(255.0f), zero);
    for (int64_t i = 0; i < how->wide; i += LANES) {
        VECTOR y = OF_VECTOR(loadu)(x + i);
        if (how->to == DTYPE_F32) {
            OF_WIDTH(put_some)((float *)job->tensors[0] + at + i, how->wide - i, y);
            continue;
        }
        y = OF_WIDTH(rounded)(OF_VECTOR(mul)(y, inverse));
        y = OF_VECTOR(add)(OF_VECTOR(min)(OF_VECTOR(max)(y, low), high), zero);
        OF_WIDTH(put_some_codes)(job->tensors[0] + at + i, how->wide - i, OF_WIDTH(to_integers)(y));
    }
}

/* Some rows of one head. */
THIS void NAMED(attend)(const int rows, const struct job *job, const struct room *room, int64_t batch,
    int64_t head, int64_t row)
{
    const struct nc_int8_attention *how = job->how;
    const int64_t width = how->width, padded = up(width, GROUP), keys = up(how->keys, LANES),
        wide = up(how->wide, LANES);
    LEFT q[SCORE_ROWS * WIDEST_HEAD + LANES];
    int32_t taken[SCORE_ROWS], total[SCORE_ROWS];
    int64_t block = 0;
    for (int r = 0; r < rows; r++) {
        const int64_t at =
            batch * how->q_strides[0] + head * how->q_strides[1] + (row + r) * how->q_strides[2];
        __m128i sums = _mm_setzero_si128();
        /* what is written behind a row is overwritten by the next */
        for (int64_t i = 0; i < width; i += LANES) {
            const __m128i codes = OF_WIDTH(some_codes)(job->tensors[1] + at + i, width - i);
            NAMED(put_left)(q + r * padded + i, codes);
            sums = add_codes(sums, codes);
        }
        taken[r] = total_of(sums) * (int32_t)how->k_zero_point;
    }
    for (; block + AT_ONCE <= keys / LANES; block += AT_ONCE)
        NAMED(score)(rows, AT_ONCE, job, room, q, taken, block);
    for (; block < keys / LANES; block++)
        NAMED(score)(rows, 1, job, room, q, taken, block);
    for (int r = 0; r < rows; r++)
        NAMED(follow)(job, 0, how->before, batch, head, row + r, room->scores + r * keys, how->keys);
    NAMED(softmax)(rows, room->scores, (LEFT *)room->codes, how->keys, (float)how->inverse_probability, total);
    for (block = 0; block + AT_ONCE <= wide / LANES; block += AT_ONCE)
        NAMED(weigh)(rows, AT_ONCE, job, room, total, block);
    if (AT_ONCE > 2 && block + 2 <= wide / LANES) {
        NAMED(weigh)(rows, 2, job, room, total, block);
        block += 2;
    }
    if (block < wide / LANES)
        NAMED(weigh)(rows, 1, job, room, total, block);
    for (int r = 0; r < rows; r++) {
        NAMED(follow)(job, how->before, how->behind, batch, head, row + r, room->sums + r * wide, how->wide);
        NAMED(put)(job, room->sums + r * wide,
            batch * how->y_strides[0] + head * how->y_strides[1] + (row + r) * how->y_strides[2]);
    }
}

FOR_THIS static void NAMED(pack_head)(const struct job *job, const struct room *room, int64_t batch,
    int64_t head)
{
    const struct nc_int8_attention *how = job->how;
    const int64_t k = batch * how->k_strides[0] + head * how->k_strides[1],
        v = batch * how->v_strides[0] + head * how->v_strides[1];
    NAMED(pack_keys)(how, (const int8_t *)job->tensors[2] + k, room);
    NAMED(pack_values)(how, (const int8_t *)job->tensors[3] + v, room);
}

FOR_THIS static void NAMED(attend_rows)(const struct job *job, const struct room *room, int64_t batch,
    int64_t head, int64_t row, int64_t end)
{
    for (; row + SCORE_ROWS <= end; row += SCORE_ROWS)
        NAMED(attend)(SCORE_ROWS, job, room, batch, head, row);
    for (; row < end; row++)
        NAMED(attend)(1, job, room, batch, head, row);
}

#undef LANES
#undef GROUP
#undef AT_ONCE
#undef WORD
#undef THIS
#undef NAMED
#undef LEFT
#undef RIGHT
#undef ONES
#undef ADD_PRODUCTS

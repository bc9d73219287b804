/* The parts of the C code that threads share, under the thread sanitizer: `make sanitize` compiles this file once for each source.
 *
 * Threads are those of POSIX, which the sanitizer knows, in the place of OpenMP's, which it does not. What is covered: how a function divides
 * its work (in_parts), what parts write, and the mark that any of them may set. What is not: torch's threads, and lists of calls.
 */
#define _GNU_SOURCE
#include SOURCE

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { TEAM = 4 };
static __thread int number;
static unsigned team;
static void (*body)(void *);
static void *given;

static int my_number(void) { return number; }
static int my_team(void) { return (int)team; }

static void *member(void *which)
{
    number = (int)(intptr_t)which;
    body(given);
    return NULL;
}

static void parallel(void (*function)(void *), void *data, unsigned threads, unsigned flags)
{
    pthread_t others[TEAM];
    (void)flags;
    team = threads, body = function, given = data;
    for (unsigned i = 1; i < threads; i++)
        pthread_create(&others[i], NULL, member, (void *)(intptr_t)i);
    member(NULL);
    for (unsigned i = 1; i < threads; i++)
        pthread_join(others[i], NULL);
}

static float *floats(int64_t count)
{
    float *x = malloc((size_t)count * sizeof *x);
    for (int64_t i = 0; i < count; i++)
        x[i] = (float)(i * 7919 % 1000) / 500 - 1;
    return x;
}

static int64_t bits(float x)
{
    int32_t found;
    memcpy(&found, &x, 4);
    return found;
}

#define CALL(function, numbers, tensors) \
    function(numbers, NULL, (int)(sizeof(tensors) / sizeof *(tensors)), (char *const *)(tensors))

#ifdef LOW_BIT
static int work_of_all(void)
{
    enum { N = 512, K = 512, M = 64, GROUP = 64 };
    float *x = floats(M * K), *scale = floats(N * K / GROUP), *offset = floats(N * K / GROUP), *y = floats(M * N), table[16] = {0};
    uint8_t *codes = calloc(N * K, 1);
    for (int isa = 0; isa <= ISA_AMX; isa++)
        for (int64_t block = -1; block <= 32; block += block < 0 ? 1 : 32)
            for (int unfit = 0; unfit < 2; unfit++) {
                const int64_t shape[] = {N, K, K, GROUP, 8, 128, isa, 0};
                x[K / 2] = x[(M - 1) * K] = unfit ? INFINITY : 1; /* in rows of several threads */
                if (!(nc_isas() >> isa & 1) || (isa == ISA_AMX && !nc_low_bit_amx()) || (isa == ISA_AVX_VNNI && !__builtin_cpu_supports("avxvnni")))
                    continue;
                if (nc_low_bit_linear(x, M, K, shape, codes, scale, offset, table, NULL, y, block, TEAM))
                    return 1;
            }
    return 0;
}
#elif defined(ATTENTION)
static int work_of_all(void)
{
    enum { HEADS_ = 3, ROWS_ = 40, KEYS_ = 64, WIDTH_ = 64 };
    const int64_t each = ROWS_ * WIDTH_, size = KEYS_ * WIDTH_, bytes = 1 << 18;
    int64_t how[1 + OTHERS] = {OTHERS, 1, HEADS_, ROWS_, KEYS_, WIDTH_, WIDTH_, HEADS_ * each, each, WIDTH_, HEADS_ * size, size, WIDTH_,
                               HEADS_ * size, size, WIDTH_, HEADS_ * each, each, WIDTH_, 1, 2, 3, 0, bits(0.001f), bits(255), bits(0.001f), bits(1),
                               0, 2, bytes, TEAM, 0, 0};
    void *tensors[] = {floats(HEADS_ * each), calloc(HEADS_ * each, 1), calloc(HEADS_ * size, 1), calloc(HEADS_ * size, 1), aligned_alloc(64, TEAM * bytes)};
    return CALL(nc_attention, how, tensors);
}
#elif defined(PRODUCTS)
static int work_of_all(void)
{
    enum { M = 200, N = 250, K = 512 };
    const int64_t packing[] = {3, N, K, TEAM};
    void *packed[] = {calloc((N + 7) / 8 * 8 * K, 1), calloc(N * K, 1), calloc(N + 16, 4)};
    const int64_t how[] = {COUNT + 1, TEAM, N, 0, FP32, IDENTITY, 0, 0, 0, 0, 0, 0, K, K, M};
    void *tensors[] = {floats(M * N), calloc(M * K, 1), packed[0], packed[2], floats(N + 16), floats(N + 16)};
    return CALL(nc_product_pack, packing, packed) || CALL(nc_product, how, tensors);
}
#else
static int work_of_all(void)
{
    enum { R = 400, N = 512, HEADS_ = 8, KEYS_ = 600, WIDE_ = 64 };
    const int64_t norm[] = {9, F32, F32, R, N, bits(1e-5f), 1, TEAM, 0, 0}, image[] = {5, 2, 30000, bits(10), 3, TEAM};
    const int64_t rotary[] = {R_SIN + 3, F32, N / 2, 1, 1, R, TEAM, 0, 0, 0, 0, N, 0, 0, N, 0, 0, N, 0, 0, N};
    const int64_t attention[] = {A_THREADS + 1, 1, HEADS_, 1, KEYS_, WIDE_, WIDE_, NO_MASK, F32, F32, F32, F32, F32, 0, WIDE_, 0, KEYS_ * WIDE_, WIDE_,
                                 0, KEYS_ * WIDE_, WIDE_, 0, WIDE_, 0, 0, 0, bits(0.1f), TEAM};
    void *rows[] = {floats(R * N), floats(R * N), floats(R * N), floats(R * N)}, *pixels[] = {calloc(180000, 1), floats(180000)};
    void *heads[] = {floats(HEADS_ * WIDE_), floats(HEADS_ * WIDE_), floats(HEADS_ * KEYS_ * WIDE_), floats(HEADS_ * KEYS_ * WIDE_)};
    return CALL(nc_step_norm, norm, rows) || CALL(nc_step_rotary, rotary, rows) || CALL(nc_step_image, image, pixels) ||
           CALL(nc_step_attention, attention, heads);
}
#endif

int main(void)
{
    nc_threads((void *)parallel, (void *)my_number, (void *)my_team);
    const int status = work_of_all();
    printf(SOURCE ": %s\n", status ? "a call failed" : "no race");
    return status;
}

/* Tiles of AMX: how they are configured, and whether this process may use them. */

#include <stdint.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

struct tiles {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16]; /* of a row of each tile */
    uint8_t rows[16];
};

/* Whether this process may use AMX from now on. The operating system must be asked once; threads and forked
 * processes may then, too. */
static inline int may_use_tiles(void)
{
#ifdef NC_EMULATED
    return 1;
#elif defined(__linux__) && defined(__x86_64__)
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XFEATURE_XTILEDATA */) == 0;
#else
    return 0;
#endif
}

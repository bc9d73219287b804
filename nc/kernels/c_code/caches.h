/* Sizes of this CPU's caches. */

#include <stdatomic.h>
#include <stdint.h>
#include <unistd.h>

/* Bytes of a core's second cache; a usual size where the system does not tell. It is asked once: older
 * versions of glibc ask the CPU, which takes microseconds in a virtual machine. */
static inline int64_t second_cache(void)
{
    static _Atomic int64_t known;
    int64_t bytes = atomic_load_explicit(&known, memory_order_relaxed);
    if (!bytes) {
#ifdef _SC_LEVEL2_CACHE_SIZE
        bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
        bytes = bytes > 0 ? bytes : 1 << 20;
        atomic_store_explicit(&known, bytes, memory_order_relaxed);
    }
    return bytes;
}

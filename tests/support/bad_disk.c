/* Preloaded into a daemon by tests: what lies under $BAD_DISK_ROOT is on a slow or full disk.
 *
 * $BAD_DISK_ORDERS is a folder: while it holds a file `full`, writes there fail with ENOSPC; while
 * it holds `slow`, each write and sync there takes 30 ms; while it holds `slow_reads`, each read takes
 * 30 ms, and the disk does one at a time for all processes; while it holds `lame_reads`, each takes 800 ms;
 * while it holds `worn_reads`, each takes 250 ms, one at a time: what is read ahead at once is of no use.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static int is_ordered(const char *what) {
    const char *folder = getenv("BAD_DISK_ORDERS");
    char path[4096];
    if (folder == NULL || snprintf(path, sizeof path, "%s/%s", folder, what) >= (int)sizeof path)
        return 0;
    return access(path, F_OK) == 0;
}

static int is_below_root(int fd) {
    const char *root = getenv("BAD_DISK_ROOT");
    char link[64], path[4096];
    ssize_t size;
    if (root == NULL) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return strncmp(path, root, strlen(root)) == 0;
}

/* 0: go on; -1: errno is set. */
static int meet(int fd, int does_write) {
    int saved = errno, is_full = does_write && is_ordered("full"), is_slow = is_ordered("slow");
    if ((is_full || is_slow) && is_below_root(fd)) {
        if (is_full) {
            errno = ENOSPC;
            return -1;
        }
        struct timespec pause = {0, 30 * 1000 * 1000};
        nanosleep(&pause, NULL);
    }
    errno = saved;
    return 0;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *data, size_t size) {
    return meet(fd, 1) ? -1 : NEXT(write)(fd, data, size);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    return meet(fd, 1) ? -1 : NEXT(pwrite)(fd, data, size, at);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    return meet(fd, 1) ? -1 : NEXT(pwrite64)(fd, data, size, at);
}

/* One read after the other, whoever asks: a lock on the folder of orders is held meanwhile. */
static void meet_read(int fd) {
    int saved = errno;
    if (is_ordered("lame_reads") && is_below_root(fd)) {
        struct timespec pause = {0, 800 * 1000 * 1000};
        nanosleep(&pause, NULL);
    }
    int is_worn = is_ordered("worn_reads");
    if ((is_worn || is_ordered("slow_reads")) && is_below_root(fd)) {
        int queue = open(getenv("BAD_DISK_ORDERS"), O_RDONLY | O_CLOEXEC);
        struct timespec pause = {0, (is_worn ? 250 : 30) * 1000 * 1000};
        if (queue >= 0) flock(queue, LOCK_EX);
        nanosleep(&pause, NULL);
        if (queue >= 0) close(queue);
    }
    errno = saved;
}

ssize_t read(int fd, void *data, size_t size) {
    meet_read(fd);
    return NEXT(read)(fd, data, size);
}

ssize_t pread(int fd, void *data, size_t size, off_t at) {
    meet_read(fd);
    return NEXT(pread)(fd, data, size, at);
}

ssize_t pread64(int fd, void *data, size_t size, off64_t at) {
    meet_read(fd);
    return NEXT(pread64)(fd, data, size, at);
}

ssize_t preadv64(int fd, const struct iovec *parts, int count, off64_t at) {
    meet_read(fd);
    return NEXT(preadv64)(fd, parts, count, at);
}

int fsync(int fd) { return meet(fd, 0) ? -1 : NEXT(fsync)(fd); }

int fdatasync(int fd) { return meet(fd, 0) ? -1 : NEXT(fdatasync)(fd); }

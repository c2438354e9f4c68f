/* Preloaded into daemons and planners by tests: their wall clock is wrong, the monotonic one is not.
 *
 * $WRONG_CLOCK is a file: while it is there, every wall clock is off by the seconds that it holds.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static long shift(void) {
    const char *path = getenv("WRONG_CLOCK");
    char text[32];
    int fd = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size;
    if (fd < 0) return 0;
    size = read(fd, text, sizeof text - 1);
    close(fd);
    if (size <= 0) return 0;
    text[size] = 0;
    return strtol(text, NULL, 10);
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    int result = NEXT(clock_gettime)(clock, at);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        at->tv_sec += shift();
    return result;
}

int gettimeofday(struct timeval *at, void *zone) {
    int result = NEXT(gettimeofday)(at, zone);
    if (result == 0) at->tv_sec += shift();
    return result;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at != NULL) *at = now.tv_sec;
    return now.tv_sec;
}

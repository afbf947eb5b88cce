/* What the load programs share: clock, addresses, samples, output as JSON lines. Each program is one file and includes this. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { EVENTS = 256, LISTEN_MAX = 8 };
static const uint64_t SECOND = 1000000000ull;

static int poller;
static long errors;
static char first_error[256];

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_nsec;
}

static double cpu_seconds(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

__attribute__((noreturn, format(printf, 1, 2))) static void die(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    exit(2);
}

__attribute__((format(printf, 1, 2))) static void count_error(const char *format, ...) {
    if (errors++ == 0) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(first_error, sizeof first_error, format, arguments);
        va_end(arguments);
        for (char *p = first_error; *p; p++)
            if (*p == '"' || *p == '\\' || (unsigned char)*p < ' ') *p = ' ';
    }
}

static struct sockaddr_in parse_address(const char *text) {
    struct sockaddr_in address = {.sin_family = AF_INET};
    char host[64];
    const char *colon = strrchr(text, ':');
    if (!colon || (size_t)(colon - text) >= sizeof host) die("%s is not ADDRESS:PORT", text);
    memcpy(host, text, (size_t)(colon - text));
    host[colon - text] = 0;
    if (inet_pton(AF_INET, host, &address.sin_addr) != 1) die("%s is not an IPv4 address", host);
    address.sin_port = htons((uint16_t)atoi(colon + 1));
    return address;
}

static void watch(int fd, uint32_t events, uint64_t data, int operation) {
    struct epoll_event event = {.events = events, .data.u64 = data};
    if (epoll_ctl(poller, operation, fd, &event) < 0) die("epoll_ctl: %s", strerror(errno));
}

/* Wait for events, at the latest until a moment of the clock. */
static int wait_events(struct epoll_event *events, uint64_t until) {
    uint64_t at = now(), left = at >= until ? 0 : until - at;
    struct timespec timeout = {.tv_sec = (time_t)(left / SECOND), .tv_nsec = (long)(left % SECOND)};
    int ready = epoll_pwait2(poller, events, EVENTS, &timeout, NULL);
    return ready < 0 ? 0 : ready;
}

static void start_process(void) {
    struct rlimit files;
    signal(SIGPIPE, SIG_IGN);
    /* What is due at a moment is sent at that moment, and not 50 us later to save a wake-up. */
    prctl(PR_SET_TIMERSLACK, 1ul);
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    poller = epoll_create1(EPOLL_CLOEXEC);
    if (poller < 0) die("cannot start: %s", strerror(errno));
}

static void set_nodelay(int fd) {
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

/* Listen on each address, mark the descriptors, and print the ports. The end of stdin will be an event of descriptor 0. */
static void listen_on_all(const char **listen_on, int count, bool *listening, size_t room) {
    int one = 1, ports[LISTEN_MAX];
    for (int i = 0; i < count; i++) {
        struct sockaddr_in address = parse_address(listen_on[i]);
        socklen_t size = sizeof address;
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (bind(fd, (struct sockaddr *)&address, sizeof address) < 0 || listen(fd, 4096) < 0 || (size_t)fd >= room)
            die("cannot listen on %s: %s", listen_on[i], strerror(errno));
        getsockname(fd, (struct sockaddr *)&address, &size);
        ports[i] = ntohs(address.sin_port);
        listening[fd] = true;
        watch(fd, EPOLLIN, (uint64_t)fd, EPOLL_CTL_ADD);
    }
    printf("{\"ports\": [");
    for (int i = 0; i < count; i++) printf("%s%d", i ? ", " : "", ports[i]);
    printf("]}\n");
    fflush(stdout);
    watch(0, EPOLLIN | EPOLLHUP, 0, EPOLL_CTL_ADD);
}

static size_t descriptor_limit(void) {
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    return (size_t)files.rlim_cur;
}

/* Durations, in units of 100 ns. */
struct samples {
    uint32_t *values;
    long count, room;
};

static void record(struct samples *s, uint64_t nanoseconds) {
    if (s->count == s->room) {
        s->room = s->room ? s->room * 2 : 1 << 16;
        s->values = realloc(s->values, (size_t)s->room * sizeof *s->values);
        if (!s->values) die("out of memory");
    }
    s->values[s->count++] = (uint32_t)(nanoseconds / 100 > UINT32_MAX ? UINT32_MAX : nanoseconds / 100);
}

static int compare_samples(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static double percentile(const struct samples *s, double part) {
    return s->values[(long)(part * (double)(s->count - 1) + 0.5)] / 10.0;
}

static void print_samples(const char *name, struct samples *s) {
    if (!s->count) return;
    qsort(s->values, (size_t)s->count, sizeof *s->values, compare_samples);
    printf(", \"%s\": {\"count\": %ld, \"p50\": %.1f, \"p90\": %.1f, \"p99\": %.1f, \"p999\": %.1f, \"max\": %.1f}", name,
           s->count, percentile(s, 0.5), percentile(s, 0.9), percentile(s, 0.99), percentile(s, 0.999), percentile(s, 1));
}

static void print_event(const char *name) {
    printf("{\"event\": \"%s\"}\n", name);
    fflush(stdout);
}

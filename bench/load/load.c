/* Cheap ends for proxy benchmarks: a server, and the clients that measure what stands between.
 *
 *   load serve   --listen 127.0.0.1:0 [--listen ...]     prints {"ports": [...]}, serves until stdin ends
 *   load connect --via ADDR ... --seconds S --concurrency N  open, one byte there and back, close; or --total M of them
 *   load bulk    --via ADDR ... --tunnels N --seconds S --direction up|down|both
 *   load echo    --via ADDR ... --tunnels K --seconds S --size B      ping-pong; with --pace MS a message each MS milliseconds
 *   load idle    --via ADDR ... --tunnels N [--stalled]      hold tunnels open until stdin ends
 *
 * Clients: --via is where to connect. With --connect HOST:PORT a CONNECT for it is sent there (--auth BASE64 adds Basic
 * credentials), without it the bytes go straight in (direct, or a TCP proxy). --hello FILE: these bytes go first, as a TLS
 * client's would. --window W: tunnels being opened at once. --fresh: no two CONNECT heads are the same.
 *
 * What goes by --seconds has --warmup before: the window is measured, totals count everything from the first to the last.
 * A paced message is timed from when it was due, whatever kept it from being sent.
 *
 * The first byte of a connection tells the server what to be: `1` send it back and close, `e` echo, `s` source, `k` sink
 * (on end of input it answers with the 8-byte count of what it got), `b` source and sink. A TLS record in front is skipped.
 * Sources send with sendfile from a memfd, sinks discard with MSG_TRUNC, so that the ends cost as little as can be.
 *
 * Output: JSON lines. {"event": "start"} and {"event": "stop"} mark the measured window, the last line is the result.
 */
#include "common.h"
#include <sys/mman.h>
#include <sys/sendfile.h>

enum { CHUNK = 1 << 20, REPLY_MAX = 512, FIRST_MAX = 4096, NUMBER_DIGITS = 12 };

static int source_file;
static char scratch[1 << 16];

static void make_source(void) {
    source_file = memfd_create("source", MFD_CLOEXEC);
    if (source_file < 0 || ftruncate(source_file, CHUNK) < 0) die("memfd: %s", strerror(errno));
    /* Real pages: a hole would be read through one shared zero page and flatter the cache. */
    char *pages = mmap(NULL, CHUNK, PROT_READ | PROT_WRITE, MAP_SHARED, source_file, 0);
    if (pages == MAP_FAILED) die("mmap: %s", strerror(errno));
    memset(pages, 'x', CHUNK);
}

/* ---- server ---- */

struct served {
    uint64_t count;      /* bytes received after the mode byte */
    uint32_t record_left; /* bytes of the leading TLS record still to come */
    uint8_t mode, header_size, header[5];
};

static void serve_close(int fd, struct served *served) {
    served[fd] = (struct served){0};
    close(fd);
}

/* Take the TLS record and the mode byte from the front of what came; return how many bytes that were. */
static size_t serve_open(struct served *s, const char *data, size_t size) {
    size_t used = 0;
    while (used < size && !s->mode) {
        if (s->record_left) {
            size_t part = size - used < s->record_left ? size - used : s->record_left;
            s->record_left -= (uint32_t)part;
            used += part;
        } else if (s->header_size || data[used] == 0x16) {
            s->header[s->header_size++] = (uint8_t)data[used++];
            if (s->header_size == 5) {
                s->record_left = (uint32_t)(s->header[3] << 8 | s->header[4]);
                s->header_size = 0;
            }
        } else {
            s->mode = (uint8_t)data[used++];
        }
    }
    return used;
}

static void serve_readable(int fd, struct served *served) {
    struct served *s = &served[fd];
    if (s->mode == 'k' || s->mode == 'b') {
        ssize_t size = recv(fd, NULL, 4 * CHUNK, MSG_TRUNC | MSG_DONTWAIT);
        if (size > 0) {
            s->count += (uint64_t)size;
        } else if (size == 0 || errno != EAGAIN) {
            if (size == 0 && s->mode == 'k') send(fd, &s->count, sizeof s->count, MSG_DONTWAIT);
            serve_close(fd, served);
        }
        return;
    }
    ssize_t size = recv(fd, scratch, sizeof scratch, MSG_DONTWAIT);
    if (size <= 0) {
        if (size == 0 || errno != EAGAIN) serve_close(fd, served);
        return;
    }
    size_t used = 0;
    if (!s->mode) {
        used = serve_open(s, scratch, (size_t)size);
        if (s->mode == '1') {
            send(fd, "1", 1, MSG_DONTWAIT);
            serve_close(fd, served);
            return;
        }
        if (s->mode == 's' || s->mode == 'b') watch(fd, EPOLLIN | EPOLLOUT, (uint64_t)fd, EPOLL_CTL_MOD);
    }
    size_t rest = (size_t)size - used;
    s->count += rest;
    if (rest && s->mode == 'e' && send(fd, scratch + used, rest, MSG_DONTWAIT) != (ssize_t)rest) serve_close(fd, served);
}

static void serve_writable(int fd, struct served *served) {
    if (served[fd].mode != 's' && served[fd].mode != 'b') return;
    off_t offset = 0;
    if (sendfile(fd, source_file, &offset, CHUNK) < 0 && errno != EAGAIN) serve_close(fd, served);
}

static int serve(const char **listen_on, int count) {
    size_t room = descriptor_limit();
    struct served *served = calloc(room, sizeof *served);
    bool *listening = calloc(room, sizeof *listening);
    listen_on_all(listen_on, count, listening, room);
    for (;;) {
        struct epoll_event events[EVENTS];
        int ready = epoll_wait(poller, events, EVENTS, -1);
        for (int i = 0; i < ready; i++) {
            int fd = (int)events[i].data.u64;
            if (fd == 0) return 0;
            if (listening[fd]) {
                int client;
                while ((client = accept4(fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
                    set_nodelay(client);
                    served[client] = (struct served){0};
                    watch(client, EPOLLIN, (uint64_t)client, EPOLL_CTL_ADD);
                }
                continue;
            }
            if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) serve_readable(fd, served);
            if (events[i].events & EPOLLOUT) serve_writable(fd, served);
        }
    }
}

/* ---- clients ---- */

static struct {
    const char *via, *connect, *auth, *hello, *direction;
    long total, concurrency, tunnels, window, size;
    double seconds, warmup, timeout, pace;
    bool stalled, fresh;
} option = {.direction = "down", .concurrency = 32, .tunnels = 1, .window = 32, .size = 1,
            .seconds = 3, .warmup = 0.5, .timeout = 10};

enum state { FREE, CONNECTING, REPLY, OPEN, ENDING, DONE };

struct tunnel {
    int fd;
    enum state state;
    uint16_t reply_size;
    uint64_t began, up, down, mark;
    char reply[REPLY_MAX];
};

static struct tunnel *tunnels;
static struct sockaddr_in via;
static char head[1024], first[FIRST_MAX];
static char *head_number; /* where each head differs from the others, if it does */
static size_t head_size, first_size;
static long pending, opened;
static uint64_t bytes_up, bytes_down;
static struct samples latencies;

static void tunnel_close(struct tunnel *t, enum state state) {
    if (t->state == CONNECTING || t->state == REPLY) pending--;
    if (t->fd >= 0) close(t->fd);
    bytes_up += t->up;
    bytes_down += t->down;
    t->fd = -1;
    t->up = t->down = 0;
    t->state = state;
}

static void tunnel_fail(struct tunnel *t, const char *what, int code) {
    count_error("%s: %s", what, code ? strerror(code) : "unexpected");
    tunnel_close(t, DONE);
}

static void tunnel_open(struct tunnel *t) {
    t->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (t->fd < 0) die("socket: %s", strerror(errno));
    set_nodelay(t->fd);
    t->began = now();
    t->reply_size = 0;
    t->state = CONNECTING;
    pending++;
    if (connect(t->fd, (struct sockaddr *)&via, sizeof via) < 0 && errno != EINPROGRESS) {
        tunnel_fail(t, "connect", errno);
        return;
    }
    watch(t->fd, EPOLLIN | EPOLLOUT | EPOLLET, (uint64_t)(t - tunnels), EPOLL_CTL_ADD);
}

static bool tunnel_send(struct tunnel *t, const char *data, size_t size) {
    ssize_t sent = send(t->fd, data, size, 0);
    if (sent == (ssize_t)size) return true;
    tunnel_fail(t, "send", sent < 0 ? errno : 0);
    return false;
}

static bool tunnel_opened(struct tunnel *t) {
    if (!tunnel_send(t, first, first_size)) return false;
    t->up += first_size;
    t->state = OPEN;
    pending--;
    opened++;
    return true;
}

/* Write the next number into the head, in as many digits as the last. */
static void number_head(void) {
    char *digit = head_number + NUMBER_DIGITS - 1;
    while (++*digit > '9') *digit-- = '0';
}

/* Bring a tunnel up; true once, when it is open. */
static bool tunnel_advance(struct tunnel *t, uint32_t events) {
    if (t->state == CONNECTING) {
        if (!(events & (EPOLLOUT | EPOLLERR | EPOLLHUP))) return false;
        int code = 0;
        socklen_t size = sizeof code;
        getsockopt(t->fd, SOL_SOCKET, SO_ERROR, &code, &size);
        if (code) {
            tunnel_fail(t, "connect", code);
            return false;
        }
        if (!head_size) return tunnel_opened(t);
        if (head_number) number_head();
        if (tunnel_send(t, head, head_size)) t->state = REPLY;
        return false;
    }
    if (!(events & (EPOLLIN | EPOLLERR | EPOLLHUP))) return false;
    ssize_t size = recv(t->fd, t->reply + t->reply_size, (size_t)(REPLY_MAX - 1 - t->reply_size), 0);
    if (size <= 0) {
        if (size == 0 || errno != EAGAIN) tunnel_fail(t, "reply to CONNECT", size ? errno : ECONNRESET);
        return false;
    }
    t->reply_size = (uint16_t)(t->reply_size + size);
    t->reply[t->reply_size] = 0;
    if (t->reply_size >= 12 && memcmp(t->reply + 9, "200", 3) != 0) {
        *strchrnul(t->reply, '\r') = 0;
        count_error("CONNECT: %s", t->reply);
        tunnel_close(t, DONE);
        return false;
    }
    char *end = strstr(t->reply, "\r\n\r\n");
    if (!end) return false;
    if (end + 4 != t->reply + t->reply_size) {
        tunnel_fail(t, "bytes before the first one was sent", 0);
        return false;
    }
    return tunnel_opened(t);
}

static void open_window(long wanted) {
    static long next;
    while (next < wanted && pending < option.window) tunnel_open(&tunnels[next++]);
}

/* Open all tunnels; edges that come for those already open are left for later. */
static void open_all(void) {
    uint64_t limit = now() + (uint64_t)((option.timeout + 30) * 1e9);
    while (opened + errors < option.tunnels) {
        struct epoll_event events[EVENTS];
        open_window(option.tunnels);
        int ready = wait_events(events, limit);
        if (now() > limit) {
            count_error("tunnels not open in time");
            break;
        }
        for (int i = 0; i < ready; i++) {
            struct tunnel *t = &tunnels[events[i].data.u64];
            if (t->state == CONNECTING || t->state == REPLY) tunnel_advance(t, events[i].events);
        }
    }
}

static void print_result(const char *mode, double seconds, double cpu, const char *format, ...) {
    printf("{\"mode\": \"%s\", \"errors\": %ld, \"first_error\": \"%s\", \"tunnels\": %ld, \"seconds\": %.6f, "
           "\"load_cpu_s\": %.6f, \"total_up\": %lu, \"total_down\": %lu",
           mode, errors, first_error, opened, seconds, cpu, bytes_up, bytes_down);
    print_samples("latency_us", &latencies);
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf("}\n");
    fflush(stdout);
}

static void connect_readable(struct tunnel *t, bool measuring) {
    for (;;) {
        char byte[16];
        ssize_t size = recv(t->fd, byte, sizeof byte, 0);
        if (size > 0) {
            if (t->state != OPEN || size != 1 || byte[0] != '1') {
                tunnel_fail(t, "another answer than the byte sent", 0);
                return;
            }
            if (measuring) record(&latencies, now() - t->began);
            t->down++;
            t->state = ENDING;
        } else if (size == 0 && t->state == ENDING) {
            tunnel_close(t, DONE);
            return;
        } else if (size < 0 && errno == EAGAIN) {
            return;
        } else {
            tunnel_fail(t, "answer", size ? errno : ECONNRESET);
            return;
        }
    }
}

/* By time, or a number of them without a warm-up. What was begun is finished; the rate is of what ended in the window. */
static void run_connect(void) {
    bool by_time = !option.total;
    uint64_t began = now(), next_check = began + SECOND, start = began + (by_time ? (uint64_t)(option.warmup * 1e9) : 0);
    uint64_t end = UINT64_MAX;
    double cpu = 0, seconds = 0;
    long started = 0, running = 0, measured = 0;
    enum { WARMING, MEASURING, FINISHING } phase = WARMING;
    for (;;) {
        uint64_t at = now();
        if (phase == WARMING && at >= start) {
            phase = MEASURING;
            cpu = cpu_seconds();
            start = at;
            if (by_time) end = start + (uint64_t)(option.seconds * 1e9);
            print_event("start");
        }
        if (phase == MEASURING && (at >= end || (!by_time && measured == option.total))) {
            phase = FINISHING;
            seconds = (double)(at - start) / 1e9;
            cpu = cpu_seconds() - cpu;
            print_event("stop");
        }
        bool goes_on = by_time ? phase != FINISHING : started < option.total;
        for (long i = 0; goes_on && i < option.concurrency; i++) {
            if (tunnels[i].state != FREE) continue;
            started++, running++;
            tunnel_open(&tunnels[i]);
            goes_on = by_time || started < option.total;
        }
        if (phase == FINISHING && !running) break;
        struct epoll_event events[EVENTS];
        uint64_t until = phase == WARMING ? start : end;
        int ready = wait_events(events, phase != FINISHING && until < next_check ? until : next_check);
        for (int i = 0; i < ready; i++) {
            struct tunnel *t = &tunnels[events[i].data.u64];
            if (t->state == CONNECTING || t->state == REPLY) tunnel_advance(t, events[i].events);
            else if (t->state == OPEN || t->state == ENDING) connect_readable(t, phase != WARMING);
        }
        at = now();
        for (long i = 0; at >= next_check && i < option.concurrency; i++)
            if (tunnels[i].state != FREE && tunnels[i].state != DONE && at - tunnels[i].began > (uint64_t)(option.timeout * 1e9))
                tunnel_fail(&tunnels[i], "a connection", ETIMEDOUT);
        if (at >= next_check) next_check = at + SECOND;
        for (long i = 0; i < option.concurrency; i++) {
            if (tunnels[i].state != DONE) continue;
            tunnels[i].state = FREE;
            running--;
            if (phase == MEASURING) measured++;
        }
    }
    print_result("connect", seconds, cpu, ", \"connections\": %ld", measured);
}

static void run_echo(void) {
    char *message = malloc((size_t)option.size);
    memset(message, 'x', (size_t)option.size);
    open_all();
    uint64_t start = now() + (uint64_t)(option.warmup * 1e9), end = start + (uint64_t)(option.seconds * 1e9);
    double cpu = 0;
    bool measuring = false;
    for (long i = 0; i < option.tunnels; i++) {
        if (tunnels[i].state != OPEN) continue;
        tunnels[i].began = now();
        if (tunnel_send(&tunnels[i], message, (size_t)option.size)) tunnels[i].up += (uint64_t)option.size;
    }
    for (uint64_t at = now(); at < end; at = now()) {
        struct epoll_event events[EVENTS];
        if (!measuring && at >= start) {
            measuring = true;
            cpu = cpu_seconds();
            print_event("start");
        }
        int ready = wait_events(events, measuring ? end : start);
        for (int i = 0; i < ready; i++) {
            struct tunnel *t = &tunnels[events[i].data.u64];
            if (t->state != OPEN) continue;
            ssize_t size = recv(t->fd, scratch, sizeof scratch, 0);
            if (size <= 0) {
                if (size == 0 || errno != EAGAIN) tunnel_fail(t, "echo", size ? errno : ECONNRESET);
                continue;
            }
            t->down += (uint64_t)size;
            t->mark += (uint64_t)size;
            if (t->mark < (uint64_t)option.size) continue;
            at = now();
            if (measuring) record(&latencies, at - t->began);
            t->mark = 0;
            t->began = at;
            if (tunnel_send(t, message, (size_t)option.size)) t->up += (uint64_t)option.size;
        }
    }
    print_event("stop");
    cpu = cpu_seconds() - cpu;
    /* The last echo is waited for, so that what was sent equals what came back. */
    uint64_t limit = now() + (uint64_t)(option.timeout * 1e9);
    for (long i = 0; i < option.tunnels; i++) {
        struct tunnel *t = &tunnels[i];
        while (t->state == OPEN && t->mark < (uint64_t)option.size && now() < limit) {
            ssize_t size = recv(t->fd, scratch, sizeof scratch, 0);
            if (size > 0) t->mark += (uint64_t)size, t->down += (uint64_t)size;
            else if (size == 0 || errno != EAGAIN) tunnel_fail(t, "echo", size ? errno : ECONNRESET);
        }
        if (t->state == OPEN) tunnel_close(t, DONE);
    }
    print_result("echo", option.seconds, cpu, "");
}

/* A message each --pace milliseconds. One that is due while the last is on its way waits, and that is part of its latency. */
static void run_paced_echo(void) {
    struct tunnel *t = &tunnels[0];
    char *message = malloc((size_t)option.size);
    memset(message, 'x', (size_t)option.size);
    option.tunnels = 1;
    open_all();
    uint64_t began = now(), start = began + (uint64_t)(option.warmup * 1e9), end = start + (uint64_t)(option.seconds * 1e9);
    double cpu = 0;
    bool measuring = false;
    for (uint64_t due = began, pace = (uint64_t)(option.pace * 1e6); due < end && t->state == OPEN; due += pace) {
        struct epoll_event events[EVENTS];
        while (now() < due) wait_events(events, due);
        if (!measuring && due >= start) {
            measuring = true;
            cpu = cpu_seconds();
            print_event("start");
        }
        if (!tunnel_send(t, message, (size_t)option.size)) break;
        t->up += (uint64_t)option.size;
        t->mark = 0;
        uint64_t limit = now() + (uint64_t)(option.timeout * 1e9);
        while (t->state == OPEN && t->mark < (uint64_t)option.size) {
            ssize_t size = recv(t->fd, scratch, sizeof scratch, 0);
            if (size > 0) t->mark += (uint64_t)size, t->down += (uint64_t)size;
            else if (size == 0 || errno != EAGAIN) tunnel_fail(t, "echo", size ? errno : ECONNRESET);
            else if (now() > limit) tunnel_fail(t, "echo", ETIMEDOUT);
            else wait_events(events, limit + 1);
        }
        if (measuring && t->state == OPEN) record(&latencies, now() - due);
    }
    /* A tunnel that was lost has no whole window. */
    if (measuring) print_event("stop");
    cpu = cpu_seconds() - cpu;
    if (t->state == OPEN) tunnel_close(t, DONE);
    print_result("echo", option.seconds, cpu, "");
}

static uint64_t moved(void) {
    uint64_t sum = 0;
    for (long i = 0; i < option.tunnels; i++) sum += tunnels[i].up + tunnels[i].down;
    return sum + bytes_up + bytes_down;
}

/* One turn of all ready tunnels: take what came, and give while `sending`. */
static void bulk_turn(uint64_t until, bool sending, long *confirmed) {
    struct epoll_event events[EVENTS];
    int ready = wait_events(events, until);
    for (int i = 0; i < ready; i++) {
        struct tunnel *t = &tunnels[events[i].data.u64];
        if (t->state != OPEN && t->state != ENDING) continue;
        if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
            ssize_t size = recv(t->fd, NULL, 4 * CHUNK, MSG_TRUNC);
            if (size > 0) {
                t->down += (uint64_t)size;
            } else if (size == 0 || errno != EAGAIN) {
                if (t->state == OPEN) {
                    tunnel_fail(t, "tunnel", size ? errno : ECONNRESET);
                } else {
                    if (size == 0) ++*confirmed;
                    tunnel_close(t, DONE);
                }
                continue;
            }
        }
        if (sending && (events[i].events & EPOLLOUT)) {
            off_t offset = 0;
            ssize_t size = sendfile(t->fd, source_file, &offset, CHUNK);
            if (size > 0) t->up += (uint64_t)size;
            else if (size < 0 && errno != EAGAIN) tunnel_fail(t, "tunnel", errno);
        }
    }
}

static void run_bulk(void) {
    bool up = strcmp(option.direction, "down") != 0, down = strcmp(option.direction, "up") != 0;
    long confirmed = 0;
    first[first_size - 1] = up && down ? 'b' : up ? 'k' : 's';
    open_all();
    for (long i = 0; i < option.tunnels; i++)
        if (tunnels[i].state == OPEN) watch(tunnels[i].fd, EPOLLIN | (up ? (uint32_t)EPOLLOUT : 0), (uint64_t)i, EPOLL_CTL_MOD);
    uint64_t start = now() + (uint64_t)(option.warmup * 1e9);
    while (now() < start) bulk_turn(start, up, &confirmed);
    for (long i = 0; i < option.tunnels; i++) tunnels[i].mark = tunnels[i].up + tunnels[i].down;
    uint64_t before = moved(), began = now(), end = began + (uint64_t)(option.seconds * 1e9);
    double cpu = cpu_seconds();
    print_event("start");
    while (now() < end) bulk_turn(end, up, &confirmed);
    double seconds = (double)(now() - began) / 1e9;
    uint64_t bytes = moved() - before;
    print_event("stop");
    cpu = cpu_seconds() - cpu;
    uint64_t least = UINT64_MAX, most = 0;
    for (long i = 0; i < option.tunnels; i++) {
        uint64_t part = tunnels[i].up + tunnels[i].down - tunnels[i].mark;
        if (tunnels[i].state != OPEN) continue;
        least = part < least ? part : least;
        most = part > most ? part : most;
    }
    /* Ended in order: half-close, then read to the end, so that both ends can be compared with the proxy's own count. */
    for (long i = 0; i < option.tunnels; i++) {
        if (tunnels[i].state != OPEN) continue;
        tunnels[i].state = ENDING;
        shutdown(tunnels[i].fd, SHUT_WR);
        watch(tunnels[i].fd, EPOLLIN, (uint64_t)i, EPOLL_CTL_MOD);
    }
    uint64_t limit = now() + (uint64_t)(option.timeout * 1e9);
    for (bool open = true; open && now() < limit;) {
        bulk_turn(now() + SECOND / 10, false, &confirmed);
        open = false;
        for (long i = 0; i < option.tunnels && !open; i++) open = tunnels[i].state == ENDING;
    }
    for (long i = 0; i < option.tunnels; i++)
        if (tunnels[i].state == ENDING) tunnel_fail(&tunnels[i], "the end of a tunnel", ETIMEDOUT);
    print_result("bulk", seconds, cpu, ", \"bytes\": %lu, \"ended_in_order\": %ld, \"least_bytes\": %lu, \"most_bytes\": %lu",
                 bytes, confirmed, least == UINT64_MAX ? 0 : least, most);
}

static void run_idle(void) {
    if (option.stalled) first[first_size - 1] = 's';
    open_all();
    printf("{\"event\": \"open\", \"tunnels\": %ld, \"errors\": %ld}\n", opened, errors);
    fflush(stdout);
    char line[8];
    while (read(0, line, sizeof line) > 0) continue;
    long lost = 0;
    for (long i = 0; i < option.tunnels; i++) {
        char byte;
        ssize_t size = tunnels[i].state == OPEN && !option.stalled ? recv(tunnels[i].fd, &byte, 1, 0) : -1;
        if (size >= 0 || (tunnels[i].state == OPEN && errno != EAGAIN && !option.stalled)) lost++;
        if (tunnels[i].state == OPEN) tunnel_close(&tunnels[i], DONE);
    }
    if (lost) count_error("%ld tunnels did not stay open", lost);
    print_result("idle", 0, 0, ", \"lost\": %ld", lost);
}

static void prepare_client(char mode) {
    if (!option.via) die("--via is missing");
    via = parse_address(option.via);
    if (option.connect) {
        head_size = (size_t)snprintf(head, sizeof head, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n%s%s%s%s\r\n", option.connect,
                                     option.connect, option.auth ? "Proxy-Authorization: Basic " : "",
                                     option.auth ? option.auth : "", option.auth ? "\r\n" : "",
                                     option.fresh ? "User-Agent: bench/000000000000\r\n" : "");
        if (head_size >= sizeof head) die("--connect and --auth are too long");
        if (option.fresh) head_number = head + head_size - 4 - NUMBER_DIGITS;
    }
    if (option.hello) {
        FILE *file = fopen(option.hello, "rb");
        if (!file) die("%s: %s", option.hello, strerror(errno));
        first_size = fread(first, 1, FIRST_MAX - 1, file);
        fclose(file);
    }
    first[first_size++] = mode;
    long count = mode == '1' ? option.concurrency : option.tunnels;
    if (option.tunnels < 1 || option.concurrency < 1 || option.size < 1 || option.size > (long)sizeof scratch)
        die("a number is out of range");
    tunnels = calloc((size_t)count, sizeof *tunnels);
    for (long i = 0; i < count; i++) tunnels[i].fd = -1;
}

int main(int argc, char **argv) {
    static const struct option names[] = {
        {"listen", 1, 0, 'l'}, {"via", 1, 0, 'v'}, {"connect", 1, 0, 'c'}, {"auth", 1, 0, 'a'},
        {"hello", 1, 0, 'h'}, {"total", 1, 0, 't'}, {"concurrency", 1, 0, 'n'}, {"tunnels", 1, 0, 'N'},
        {"window", 1, 0, 'w'}, {"size", 1, 0, 'b'}, {"seconds", 1, 0, 's'}, {"warmup", 1, 0, 'W'},
        {"timeout", 1, 0, 'T'}, {"direction", 1, 0, 'd'}, {"stalled", 0, 0, 'S'},
        {"fresh", 0, 0, 'f'}, {"pace", 1, 0, 'P'}, {0, 0, 0, 0},
    };
    const char *listen_on[LISTEN_MAX];
    int listen_count = 0;
    for (int choice; (choice = getopt_long(argc, argv, "", names, NULL)) != -1;) {
        switch (choice) {
        case 'l':
            if (listen_count == LISTEN_MAX) die("too many --listen");
            listen_on[listen_count++] = optarg;
            break;
        case 'v': option.via = optarg; break;
        case 'c': option.connect = optarg; break;
        case 'a': option.auth = optarg; break;
        case 'h': option.hello = optarg; break;
        case 't': option.total = atol(optarg); break;
        case 'n': option.concurrency = atol(optarg); break;
        case 'N': option.tunnels = atol(optarg); break;
        case 'w': option.window = atol(optarg); break;
        case 'b': option.size = atol(optarg); break;
        case 's': option.seconds = atof(optarg); break;
        case 'W': option.warmup = atof(optarg); break;
        case 'T': option.timeout = atof(optarg); break;
        case 'd': option.direction = optarg; break;
        case 'S': option.stalled = true; break;
        case 'f': option.fresh = true; break;
        case 'P': option.pace = atof(optarg); break;
        default: return 2;
        }
    }
    const char *mode = optind < argc ? argv[optind] : "";
    start_process();
    make_source();
    if (!strcmp(mode, "serve")) return serve(listen_on, listen_count);
    prepare_client(!strcmp(mode, "connect") ? '1' : 'e');
    if (!strcmp(mode, "connect")) run_connect();
    else if (!strcmp(mode, "bulk")) run_bulk();
    else if (!strcmp(mode, "echo") && option.pace > 0) run_paced_echo();
    else if (!strcmp(mode, "echo")) run_echo();
    else if (!strcmp(mode, "idle")) run_idle();
    else die("usage: load serve|connect|bulk|echo|idle [options]");
    return 0;
}

/* The physical limit: a CONNECT proxy that does nothing but its work. epoll, splice(2), pooled pipes; no policy, no log, no
 * limits, IPv4 literals only. What a real gateway costs beyond this is the price of its checks and of its language.
 *
 *   splicer PORT
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

enum { EVENTS = 256, PIPE = 1 << 20, BULK = 16 << 10, COPY = 64 << 10, TURNS = 8, HEAD = 4096 };
static const char ESTABLISHED[] = "HTTP/1.1 200 Connection established\r\n\r\n";

struct pipe { int out, in; };
struct end {
    struct tunnel *tunnel;
    int fd;
    struct pipe pipe; /* bytes on their way from this end to the other; in == 0 means none is held */
    size_t in_pipe;
    char *held; /* the same where they were copied and the other end did not take all */
    size_t held_size;
    uint32_t events;
    bool ended, bulk, watched;
};
struct tunnel {
    struct end client, server;
    size_t head_size;
    bool closed, connecting;
    struct tunnel *next;
    char head[HEAD];
};

static int poller;
static struct pipe pool[1024];
static int pooled;
static struct tunnel *garbage; /* freed after a round of events: one of them may still name it */
static char copy[COPY];

static struct end *other(struct end *e) { return e == &e->tunnel->client ? &e->tunnel->server : &e->tunnel->client; }

static void watch(struct end *e, uint32_t events) {
    struct epoll_event event = {.events = events, .data.ptr = e};
    if (e->events != events) epoll_ctl(poller, e->watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, e->fd, &event);
    e->events = events;
    e->watched = true;
}

static bool take_pipe(struct end *e) {
    static bool used_up;
    if (e->pipe.in) return true;
    if (pooled) {
        e->pipe = pool[--pooled];
        return true;
    }
    int ends[2];
    if (used_up || pipe2(ends, O_NONBLOCK | O_CLOEXEC) < 0) return false;
    if (fcntl(ends[1], F_SETPIPE_SZ, PIPE) < 0) {
        /* fs.pipe-user-pages-soft is reached: what comes now is smaller than a copy is worth. */
        used_up = true;
        close(ends[0]);
        close(ends[1]);
        return false;
    }
    e->pipe = (struct pipe){ends[0], ends[1]};
    return true;
}

static void drop_pipe(struct end *e) {
    if (!e->pipe.in) return;
    if (e->in_pipe || pooled == (int)(sizeof pool / sizeof *pool)) {
        close(e->pipe.in);
        close(e->pipe.out);
    } else {
        pool[pooled++] = e->pipe;
    }
    e->pipe = (struct pipe){0, 0};
}

static void finish(struct tunnel *t) {
    if (t->closed) return;
    t->closed = true;
    drop_pipe(&t->client);
    drop_pipe(&t->server);
    free(t->client.held);
    free(t->server.held);
    close(t->client.fd);
    if (t->server.fd >= 0) close(t->server.fd);
    t->next = garbage;
    garbage = t;
}

static void end_of(struct end *e) {
    struct end *to = other(e);
    e->ended = true;
    drop_pipe(e);
    watch(e, e->events & ~(uint32_t)EPOLLIN);
    if (to->ended) finish(e->tunnel);
    else shutdown(to->fd, SHUT_WR);
}

/* Write what is on its way; false when the tunnel is gone or the receiver takes no more for now. */
static bool flush(struct end *from) {
    struct end *to = other(from);
    while (from->in_pipe || from->held_size) {
        ssize_t size = from->in_pipe
            ? splice(from->pipe.out, NULL, to->fd, NULL, from->in_pipe, SPLICE_F_MOVE | SPLICE_F_NONBLOCK)
            : send(to->fd, from->held, from->held_size, 0);
        if (size < 0 && errno == EAGAIN) {
            watch(from, from->events & ~(uint32_t)EPOLLIN);
            watch(to, to->events | EPOLLOUT);
            return false;
        }
        if (size <= 0) {
            finish(from->tunnel);
            return false;
        }
        if (from->in_pipe) {
            from->in_pipe -= (size_t)size;
        } else {
            from->held_size -= (size_t)size;
            memmove(from->held, from->held + size, from->held_size);
        }
    }
    free(from->held);
    from->held = NULL;
    return true;
}

static void copy_once(struct end *from) {
    ssize_t size = recv(from->fd, copy, COPY, 0);
    if (size == 0) end_of(from);
    else if (size < 0 && errno != EAGAIN) finish(from->tunnel);
    if (size <= 0) return;
    from->bulk = size == COPY;
    ssize_t sent = send(other(from)->fd, copy, (size_t)size, 0);
    if (sent == size) return;
    if (sent < 0) sent = 0;
    from->held_size = (size_t)(size - sent);
    from->held = malloc(from->held_size);
    if (!from->held) exit(1);
    memcpy(from->held, copy + sent, from->held_size);
    flush(from);
}

static void move(struct end *from) {
    if (!from->bulk || !take_pipe(from)) {
        copy_once(from);
        return;
    }
    for (int turn = 0; turn < TURNS; turn++) {
        ssize_t size = splice(from->fd, NULL, from->pipe.in, NULL, PIPE, SPLICE_F_MOVE | SPLICE_F_NONBLOCK);
        if (size == 0) {
            end_of(from);
            return;
        }
        if (size < 0) {
            if (errno != EAGAIN) {
                finish(from->tunnel);
                return;
            }
            break;
        }
        from->in_pipe = (size_t)size;
        if (!flush(from)) return;
        if (size < BULK) {
            from->bulk = false;
            break;
        }
    }
    drop_pipe(from);
}

static void dial(struct tunnel *t) {
    char *target = t->head + 8, *space, *colon;
    struct sockaddr_in address = {.sin_family = AF_INET};
    int one = 1;
    t->head[t->head_size < HEAD ? t->head_size : HEAD - 1] = 0;
    if (strncmp(t->head, "CONNECT ", 8) || !(space = strchr(target, ' '))) {
        finish(t);
        return;
    }
    *space = 0;
    if (!(colon = strrchr(target, ':'))) {
        finish(t);
        return;
    }
    *colon = 0;
    address.sin_port = htons((uint16_t)atoi(colon + 1));
    t->server.fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    setsockopt(t->server.fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(t->client.fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (inet_pton(AF_INET, target, &address.sin_addr) != 1 ||
        (connect(t->server.fd, (struct sockaddr *)&address, sizeof address) < 0 && errno != EINPROGRESS)) {
        finish(t);
        return;
    }
    t->connecting = true;
    watch(&t->server, EPOLLOUT);
}

static void on_event(struct end *e, uint32_t events) {
    struct tunnel *t = e->tunnel;
    if (t->closed) return;
    if (t->connecting) {
        int code = 0;
        socklen_t size = sizeof code;
        if (e != &t->server) return;
        getsockopt(e->fd, SOL_SOCKET, SO_ERROR, &code, &size);
        if (code || send(t->client.fd, ESTABLISHED, sizeof ESTABLISHED - 1, 0) < 0) {
            finish(t);
            return;
        }
        t->connecting = false;
        watch(&t->client, EPOLLIN);
        watch(&t->server, EPOLLIN);
    } else if (t->server.fd < 0) {
        ssize_t size = recv(e->fd, t->head + t->head_size, HEAD - t->head_size, 0);
        if (size <= 0) {
            if (size == 0 || errno != EAGAIN) finish(t);
            return;
        }
        t->head_size += (size_t)size;
        if (t->head_size >= 4 && !memcmp(t->head + t->head_size - 4, "\r\n\r\n", 4)) dial(t);
        else if (t->head_size == HEAD) finish(t);
    } else {
        if (events & EPOLLOUT) {
            struct end *from = other(e);
            if (flush(from)) {
                drop_pipe(from);
                watch(e, e->events & ~(uint32_t)EPOLLOUT);
                if (!from->ended) watch(from, from->events | EPOLLIN);
            }
        }
        if (!t->closed && (e->events & EPOLLIN) && (events & (EPOLLIN | EPOLLHUP | EPOLLERR))) move(e);
        else if (!t->closed && (events & EPOLLERR)) finish(t);
    }
}

static void on_acceptable(int listener) {
    int fd;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        struct tunnel *t = malloc(sizeof *t);
        if (!t) exit(1);
        memset(t, 0, offsetof(struct tunnel, head));
        t->client = (struct end){.tunnel = t, .fd = fd};
        t->server = (struct end){.tunnel = t, .fd = -1};
        watch(&t->client, EPOLLIN);
        on_event(&t->client, EPOLLIN);
    }
}

int main(int argc, char **argv) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct rlimit files;
    int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    struct end self = {.fd = listener};
    if (argc != 2) return 2;
    signal(SIGPIPE, SIG_IGN);
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    poller = epoll_create1(EPOLL_CLOEXEC);
    address.sin_port = htons((uint16_t)atoi(argv[1]));
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) < 0 || listen(listener, 4096) < 0) {
        perror("splicer");
        return 1;
    }
    watch(&self, EPOLLIN);
    for (;;) {
        struct epoll_event events[EVENTS];
        int ready = epoll_wait(poller, events, EVENTS, -1);
        for (int i = 0; i < ready; i++) {
            struct end *e = events[i].data.ptr;
            if (e == &self) on_acceptable(listener);
            else on_event(e, events[i].events);
        }
        while (garbage) {
            struct tunnel *t = garbage;
            garbage = t->next;
            free(t);
        }
    }
}

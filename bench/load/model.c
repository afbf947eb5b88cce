/* A model provider and its clients, for benchmarks of what stands between.
 *
 *   model serve    --listen 127.0.0.1:0                         prints {"ports": [...]}, serves until stdin ends
 *   model requests --via ADDR --path P --connections C --seconds S --body B   one request after the other on each connection,
 *                                                               or with --total M so many
 *   model events   --via ADDR --path P --connections C --seconds S            streams, each event sent by itself
 *   model rated    --via ADDR --path P --connections C --rate R --seconds S   R requests a second, whether or not others have ended
 *   model paced    --via ADDR --path P --connections C --seconds S            streams of one event each --pace milliseconds
 *
 * What the provider answers is said by the query: `?bench=small` a short JSON reply, `?bench=events:N` a stream of N events
 * as fast as they are taken, `?bench=paced:N:MS` the same with MS milliseconds between two; or, because not every relay passes a
 * query on, by a model of that name (--model) in the body. Every event holds the moment it was due (sent, if it has no pace), by
 * the clock that both ends share: so the client knows how late it comes, whoever was late. --token is sent as Bearer credentials,
 * --header as a further header line.
 *
 * Output as of load.c. `requests` and `events` time a request from its first byte sent, `rated` from when it was due, `first_us` to
 * the reply's first byte. `measured` replies ended in the window. Of all replies, for comparison with others' counts: `finished`,
 * the `output_tokens` that they say they used, and `body_down`, the bytes behind their heads as they are framed.
 */
#include "common.h"

enum { BODY_MAX = 1 << 20, BUFFER = 1 << 16, EVENT_MAX = 256, HEAD_MAX = 2048, HEADERS_MAX = 4 };

static const char DELTA[] =
    "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\","
    "\"text\":\"%020lu and a few words\"}}\n\n";
static const char START[] =
    "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"id\":\"msg_bench\",\"type\":\"message\",\"role\":"
    "\"assistant\",\"model\":\"claude-bench\",\"content\":[],\"usage\":{\"input_tokens\":25,\"output_tokens\":1}}}\n\n";
static const char FINISH[] =
    "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\"usage\":"
    "{\"output_tokens\":%ld}}\n\n";
static const char STOP[] = "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";
static const char SMALL[] =
    "{\"id\":\"msg_bench\",\"type\":\"message\",\"role\":\"assistant\",\"model\":\"claude-bench\",\"content\":[{\"type\":"
    "\"text\",\"text\":\"A short answer of a dozen words or so, as a tool call would have it.\"}],\"stop_reason\":"
    "\"end_turn\",\"usage\":{\"input_tokens\":25,\"output_tokens\":17}}";

/* ---- provider ---- */

struct served {
    char head[HEAD_MAX];
    size_t head_size;
    char asked[64]; /* what the body says of the kind of answer */
    uint64_t body_left, due, pace;
    long events_left, events; /* of the stream under way */
    bool streaming, paced;
    int next; /* in the list of paced streams, in the order they are due */
};

static struct served *served;
static int first_due = -1, last_due = -1;

static bool give(int fd, const char *data, size_t size) {
    ssize_t sent = send(fd, data, size, MSG_DONTWAIT);
    if (sent == (ssize_t)size) return true;
    /* A client that does not read a few kilobytes is no load to be measured. */
    fprintf(stderr, "a client does not read\n");
    return false;
}

static bool give_chunk(int fd, const char *data, size_t size) {
    char chunk[EVENT_MAX + 512];
    int prefix = snprintf(chunk, sizeof chunk, "%zx\r\n", size);
    memcpy(chunk + prefix, data, size);
    memcpy(chunk + prefix + size, "\r\n", 2);
    return give(fd, chunk, (size_t)prefix + size + 2);
}

static void schedule(int fd, uint64_t due) {
    served[fd].due = due;
    served[fd].next = -1;
    if (last_due >= 0 && served[last_due].due > due) {
        /* Only among streams that begin while others are late. */
        int *link = &first_due;
        while (served[*link].due <= due) link = &served[*link].next;
        served[fd].next = *link;
        *link = fd;
        return;
    }
    if (last_due >= 0) served[last_due].next = fd;
    else first_due = fd;
    last_due = fd;
}

static void drop(int fd) {
    if (served[fd].paced && served[fd].streaming) {
        int *link = &first_due, previous = -1;
        while (*link >= 0 && *link != fd) {
            previous = *link;
            link = &served[*link].next;
        }
        if (*link == fd) {
            *link = served[fd].next;
            if (last_due == fd) last_due = previous;
        }
    }
    memset(&served[fd], 0, sizeof served[fd]);
    close(fd);
}

/* Send one event of a stream, or its end. False when the stream is over or the client gone. */
static bool stream_turn(int fd) {
    struct served *s = &served[fd];
    char event[EVENT_MAX];
    if (s->events_left > 0) {
        int size = snprintf(event, sizeof event, DELTA, s->paced ? s->due : now());
        s->events_left--;
        return give_chunk(fd, event, (size_t)size);
    }
    s->streaming = false;
    int size = snprintf(event, sizeof event, FINISH, s->events);
    give_chunk(fd, event, (size_t)size);
    give_chunk(fd, STOP, sizeof STOP - 1);
    give(fd, "0\r\n\r\n", 5);
    return false;
}

static void answer(int fd) {
    struct served *s = &served[fd];
    char *kind = strstr(s->head, "bench=");
    if (!kind) kind = strstr(s->asked, "bench=");
    s->head_size = 0;
    if (kind && !strncmp(kind, "bench=small", 11)) {
        char reply[1024];
        int size = snprintf(reply, sizeof reply,
                            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nrequest-id: req_bench\r\n"
                            "Content-Length: %zu\r\n\r\n%s", sizeof SMALL - 1, SMALL);
        give(fd, reply, (size_t)size);
        return;
    }
    static const char head[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
                               "request-id: req_bench\r\nTransfer-Encoding: chunked\r\n\r\n";
    s->paced = kind && !strncmp(kind, "bench=paced:", 12);
    s->events = s->events_left = kind ? atol(strchr(kind, ':') + 1) : 0;
    s->streaming = true;
    give(fd, head, sizeof head - 1);
    give_chunk(fd, START, sizeof START - 1);
    char *pace = s->paced ? strchr(strchr(kind, ':') + 1, ':') : NULL;
    s->pace = (pace ? strtoull(pace + 1, NULL, 10) : 100) * 1000000;
    if (s->paced) schedule(fd, now() + s->pace);
    else watch(fd, EPOLLIN | EPOLLOUT, (uint64_t)fd, EPOLL_CTL_MOD);
}

static void find_asked(struct served *s, const char *data, size_t size) {
    const char *found = s->asked[0] ? NULL : memmem(data, size, "bench=", 6);
    if (!found) return;
    size_t left = size - (size_t)(found - data);
    memcpy(s->asked, found, left < sizeof s->asked - 1 ? left : sizeof s->asked - 1);
    s->asked[left < sizeof s->asked - 1 ? left : sizeof s->asked - 1] = 0;
}

static void serve_readable(int fd) {
    static char buffer[BUFFER];
    struct served *s = &served[fd];
    if (s->body_left) {
        ssize_t size = recv(fd, buffer, s->body_left < BUFFER ? s->body_left : BUFFER, MSG_DONTWAIT);
        if (size <= 0) {
            if (size == 0 || errno != EAGAIN) drop(fd);
            return;
        }
        s->body_left -= (uint64_t)size;
        find_asked(s, buffer, (size_t)size);
        if (!s->body_left) answer(fd);
        return;
    }
    ssize_t size = recv(fd, s->head + s->head_size, HEAD_MAX - 1 - s->head_size, MSG_DONTWAIT);
    if (size <= 0) {
        if (size == 0 || errno != EAGAIN) drop(fd);
        return;
    }
    s->head_size += (size_t)size;
    s->head[s->head_size] = 0;
    char *end = strstr(s->head, "\r\n\r\n");
    if (!end) {
        if (s->head_size == HEAD_MAX - 1) drop(fd);
        return;
    }
    char *length = strcasestr(s->head, "\r\ncontent-length:");
    uint64_t body = length && length < end ? strtoull(length + 17, NULL, 10) : 0;
    uint64_t read = s->head_size - (size_t)(end + 4 - s->head);
    *end = 0;
    s->asked[0] = 0;
    find_asked(s, end + 4, read);
    s->body_left = body > read ? body - read : 0;
    if (!s->body_left) answer(fd);
}

static int serve(const char **listen_on, int count) {
    size_t room = descriptor_limit();
    bool *listening = calloc(room, sizeof *listening);
    served = calloc(room, sizeof *served);
    listen_on_all(listen_on, count, listening, room);
    for (;;) {
        struct epoll_event events[EVENTS];
        int ready = wait_events(events, first_due >= 0 ? served[first_due].due : now() + SECOND);
        for (int i = 0; i < ready; i++) {
            int fd = (int)events[i].data.u64, client;
            if (fd == 0) return 0;
            if (listening[fd]) {
                while ((client = accept4(fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
                    set_nodelay(client);
                    watch(client, EPOLLIN, (uint64_t)client, EPOLL_CTL_ADD);
                }
                continue;
            }
            if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) serve_readable(fd);
            if ((events[i].events & EPOLLOUT) && served[fd].streaming && !served[fd].paced && !stream_turn(fd))
                watch(fd, EPOLLIN, (uint64_t)fd, EPOLL_CTL_MOD);
        }
        while (first_due >= 0 && served[first_due].due <= now()) {
            int fd = first_due;
            first_due = served[fd].next;
            if (first_due < 0) last_due = -1;
            if (stream_turn(fd)) schedule(fd, served[fd].due + served[fd].pace);
        }
    }
}

/* ---- clients ---- */

static struct {
    const char *via, *path, *token, *model, *header[HEADERS_MAX];
    int headers;
    long connections, total, body, pace;
    double seconds, warmup, rate;
} option = {.path = "/v1/messages?bench=small", .model = "claude-bench", .connections = 16, .body = 2000, .pace = 100, .rate = 100, .seconds = 3, .warmup = 0.5};

struct client {
    int fd;
    uint64_t sent_at;
    size_t unsent; /* of the request, when the socket did not take it whole */
    bool waiting, first_seen, done;
    int head_end; /* how much of the empty line behind the reply's head was seen */
    char tail[EVENT_MAX]; /* what may be the beginning of something that continues in the next read */
    size_t tail_size;
};

static struct client *clients;
static char *request;
static size_t request_size;
static struct samples latencies, firsts, lateness;
static long started, finished, events_seen, output_tokens;
static uint64_t body_down;
static bool measuring;

static void client_end(struct client *c) {
    close(c->fd);
    c->fd = -1;
    c->done = true;
}

static void client_fail(struct client *c, const char *what, int code) {
    count_error("%s: %s", what, code ? strerror(code) : "unexpected");
    finished++;
    client_end(c);
}

static void client_send(struct client *c) {
    size_t at = request_size - c->unsent;
    ssize_t size = send(c->fd, request + at, c->unsent, 0);
    if (size < 0 && errno != EAGAIN) {
        client_fail(c, "send", errno);
        return;
    }
    if (size > 0) c->unsent -= (size_t)size;
    watch(c->fd, EPOLLIN | (c->unsent ? (uint32_t)EPOLLOUT : 0), (uint64_t)(c - clients), EPOLL_CTL_MOD);
}

static void client_start(struct client *c) {
    started++;
    c->sent_at = now();
    c->unsent = request_size;
    c->first_seen = false;
    c->head_end = 0;
    c->tail_size = 0;
    c->waiting = true;
    client_send(c);
}

/* Count the bytes behind the reply's head. */
static void count_body(struct client *c, const char *data, size_t size) {
    static const char end[] = "\r\n\r\n";
    size_t used = 0;
    for (; used < size && c->head_end < 4; used++)
        c->head_end = data[used] == end[c->head_end] ? c->head_end + 1 : data[used] == '\r';
    body_down += size - used;
}

/* Take the tokens that a whole reply says it used, from its last bytes. */
static void count_tokens(const char *data, size_t size) {
    static const char name[] = "\"output_tokens\":";
    for (size_t at = size >= sizeof name - 1 ? size - (sizeof name - 1) + 1 : 0; at-- > 0;)
        if (!memcmp(data + at, name, sizeof name - 1)) {
            output_tokens += atol(data + at + sizeof name - 1);
            return;
        }
}

/* Read what came of a reply; true when it is whole. */
static bool client_read(struct client *c) {
    static char buffer[EVENT_MAX + BUFFER + 1];
    memcpy(buffer, c->tail, c->tail_size);
    ssize_t size = recv(c->fd, buffer + c->tail_size, BUFFER, 0);
    if (size <= 0) {
        if (size == 0 || errno != EAGAIN) client_fail(c, "reply", size ? errno : ECONNRESET);
        return false;
    }
    uint64_t at = now();
    char *start = buffer, *end = buffer + c->tail_size + size;
    *end = 0;
    count_body(c, buffer + c->tail_size, (size_t)size);
    if (!c->first_seen) {
        c->first_seen = true;
        if (memcmp(buffer, "HTTP/1.1 200", 12) != 0) {
            *strchrnul(buffer, '\r') = 0;
            count_error("reply: %s", buffer);
            finished++;
            client_end(c);
            return false;
        }
        if (measuring) record(&firsts, at - c->sent_at);
    }
    bool whole = end - buffer >= 5 && !memcmp(end - 5, "0\r\n\r\n", 5);
    for (char *text; (text = memmem(start, (size_t)(end - start), "\"text\":\"", 8)) && end - text >= 28; start = text + 8) {
        if (text[8] != '0') continue; /* the short reply's text */
        if (measuring) {
            events_seen++;
            record(&lateness, at - strtoull(text + 8, NULL, 10));
        }
    }
    if (!whole && memmem(buffer, (size_t)(end - buffer), "\"output_tokens\":17}}", 20)) whole = true;
    size_t keep = (size_t)(end - start) < EVENT_MAX - 64 ? (size_t)(end - start) : EVENT_MAX - 64;
    memcpy(c->tail, end - keep, keep);
    c->tail_size = keep;
    /* An event's tail is shorter than what is kept. */
    size_t last = (size_t)(end - buffer) < EVENT_MAX ? (size_t)(end - buffer) : EVENT_MAX;
    if (whole) count_tokens(end - last, last);
    return whole;
}

static void open_clients(void) {
    struct sockaddr_in via = parse_address(option.via);
    clients = calloc((size_t)option.connections, sizeof *clients);
    for (long i = 0; i < option.connections; i++) {
        struct client *c = &clients[i];
        c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&via, sizeof via) < 0) die("connect: %s", strerror(errno));
        fcntl(c->fd, F_SETFL, O_NONBLOCK);
        set_nodelay(c->fd);
        watch(c->fd, EPOLLIN, (uint64_t)i, EPOLL_CTL_ADD);
    }
}

static void prepare_request(void) {
    if (!option.via || option.body < 200 || option.body > BODY_MAX || option.connections < 1) die("an option is missing or out of range");
    request = malloc((size_t)option.body + HEAD_MAX);
    char more[1024] = "";
    int length = option.token ? snprintf(more, sizeof more, "Authorization: Bearer %s\r\n", option.token) : 0;
    for (int i = 0; i < option.headers && length < (int)sizeof more; i++)
        length += snprintf(more + length, sizeof more - (size_t)length, "%s\r\n", option.header[i]);
    if (length >= (int)sizeof more) die("--token and --header are too long");
    int size = snprintf(request, HEAD_MAX,
                        "POST %s HTTP/1.1\r\nHost: bench.example\r\nContent-Type: application/json\r\nAccept: application/json\r\n"
                        "anthropic-version: 2023-06-01\r\nUser-Agent: bench\r\n%sContent-Length: %ld\r\n\r\n",
                        option.path, more, option.body);
    request_size = (size_t)(size + option.body);
    char *body = request + size;
    int begin = sprintf(body, "{\"model\":\"%s\",\"max_tokens\":1024,\"stream\":%s,\"messages\":[{\"role\":\"user\",\"content\":\"",
                        option.model, strstr(option.path, "small") ? "false" : "true");
    memset(body + begin, 'x', (size_t)(option.body - begin));
    memcpy(body + option.body - 4, "\"}]}", 4);
}

static void turn(uint64_t until, bool again) {
    struct epoll_event events[EVENTS];
    int ready = wait_events(events, until);
    for (int i = 0; i < ready; i++) {
        struct client *c = &clients[events[i].data.u64];
        if (c->done) continue;
        if (events[i].events & EPOLLOUT && c->unsent) client_send(c);
        if (c->done || !(events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) || !client_read(c)) continue;
        if (measuring) record(&latencies, now() - c->sent_at);
        finished++;
        c->waiting = false;
        if (again && (!option.total || started < option.total)) client_start(c);
    }
}

static void print_result(const char *mode, double seconds, double cpu, long measured) {
    printf("{\"mode\": \"%s\", \"errors\": %ld, \"first_error\": \"%s\", \"seconds\": %.6f, \"load_cpu_s\": %.6f, "
           "\"requests\": %ld, \"finished\": %ld, \"measured\": %ld, \"events\": %ld, \"output_tokens\": %ld, \"body_down\": %lu",
           mode, errors, first_error, seconds, cpu, started, finished, measured, events_seen, output_tokens, body_down);
    print_samples("latency_us", &latencies);
    print_samples("first_us", &firsts);
    print_samples("late_us", &lateness);
    printf("}\n");
    fflush(stdout);
}

static void wait_for_all(double timeout) {
    uint64_t limit = now() + (uint64_t)(timeout * 1e9);
    while (finished < started && now() < limit) turn(limit, false);
    if (finished < started) count_error("%ld replies did not end", started - finished);
}

static void run_requests(void) {
    bool by_time = !option.total;
    uint64_t start = now() + (by_time ? (uint64_t)(option.warmup * 1e9) : 0);
    for (long i = 0; i < option.connections && (by_time || started < option.total); i++) client_start(&clients[i]);
    while (now() < start) turn(start, true);
    measuring = true;
    long before = by_time ? finished : 0;
    double cpu = cpu_seconds();
    uint64_t began = now(), end = began + (by_time ? (uint64_t)(option.seconds * 1e9) : 600 * SECOND);
    print_event("start");
    while (now() < end && (by_time || finished < started)) turn(end, true);
    long measured = finished - before;
    double seconds = (double)(now() - began) / 1e9;
    cpu = cpu_seconds() - cpu;
    print_event("stop");
    wait_for_all(30);
    print_result("requests", seconds, cpu, measured);
}

static struct client *find_free(void) {
    static long next;
    for (long i = 0; i < option.connections; i++) {
        struct client *c = &clients[next++ % option.connections];
        if (!c->done && !c->waiting) return c;
    }
    return NULL;
}

static void run_rated(void) {
    option.total = 0;
    long before = 0;
    uint64_t began = now(), start = began + (uint64_t)(option.warmup * 1e9), end = start + (uint64_t)(option.seconds * 1e9);
    double cpu = 0;
    for (uint64_t due = began, period = (uint64_t)(1e9 / option.rate); due < end; due += period) {
        while (now() < due) turn(due, false);
        if (!measuring && due >= start) {
            measuring = true;
            before = finished;
            cpu = cpu_seconds();
            print_event("start");
        }
        struct client *c;
        while (!(c = find_free()) && now() < end + 30 * SECOND) turn(now() + SECOND, false);
        if (!c) die("no connection came free");
        client_start(c);
        /* Whatever kept it (no free connection, or this program itself), it has waited from when it was due. */
        c->sent_at = due;
    }
    long measured = finished - before;
    /* More than was asked for, when the last ones waited. */
    double seconds = (double)(now() - start) / 1e9;
    cpu = cpu_seconds() - cpu;
    print_event("stop");
    wait_for_all(30);
    print_result("rated", seconds, cpu, measured);
}

static void run_streams(const char *mode) {
    option.total = 0;
    /* Spread over one pace, so that paced streams do not come in one heap. */
    for (long i = 0; i < option.connections; i++) {
        uint64_t at = now() + (uint64_t)option.pace * 1000000 / (uint64_t)option.connections;
        client_start(&clients[i]);
        while (now() < at) turn(at, true);
    }
    uint64_t start = now() + (uint64_t)(option.warmup * 1e9), end = start + (uint64_t)(option.seconds * 1e9);
    while (now() < start) turn(start, true);
    measuring = true;
    long before = finished;
    double cpu = cpu_seconds();
    print_event("start");
    while (now() < end) turn(end, true);
    measuring = false;
    long measured = finished - before;
    cpu = cpu_seconds() - cpu;
    print_event("stop");
    wait_for_all(option.seconds + 30);
    print_result(mode, option.seconds, cpu, measured);
}

int main(int argc, char **argv) {
    static const struct option names[] = {
        {"listen", 1, 0, 'l'}, {"via", 1, 0, 'v'}, {"path", 1, 0, 'p'}, {"token", 1, 0, 'k'}, {"connections", 1, 0, 'n'},
        {"total", 1, 0, 't'}, {"body", 1, 0, 'b'}, {"seconds", 1, 0, 's'}, {"warmup", 1, 0, 'W'}, {"pace", 1, 0, 'P'}, {"model", 1, 0, 'm'}, {"rate", 1, 0, 'r'},
        {"header", 1, 0, 'H'}, {0, 0, 0, 0},
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
        case 'p': option.path = optarg; break;
        case 'k': option.token = optarg; break;
        case 'n': option.connections = atol(optarg); break;
        case 't': option.total = atol(optarg); break;
        case 'b': option.body = atol(optarg); break;
        case 's': option.seconds = atof(optarg); break;
        case 'W': option.warmup = atof(optarg); break;
        case 'm': option.model = optarg; break;
        case 'P': option.pace = atol(optarg); break;
        case 'r': option.rate = atof(optarg); break;
        case 'H':
            if (option.headers == HEADERS_MAX) die("too many --header");
            option.header[option.headers++] = optarg;
            break;
        default: return 2;
        }
    }
    const char *mode = optind < argc ? argv[optind] : "";
    start_process();
    if (!strcmp(mode, "serve")) return serve(listen_on, listen_count);
    prepare_request();
    open_clients();
    if (!strcmp(mode, "requests")) run_requests();
    else if (!strcmp(mode, "rated")) run_rated();
    else if (!strcmp(mode, "events") || !strcmp(mode, "paced")) run_streams(mode);
    else die("usage: model serve|requests|rated|events|paced [options]");
    return 0;
}

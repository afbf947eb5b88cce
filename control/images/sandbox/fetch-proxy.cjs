// Makes `fetch` go by HTTP_PROXY, HTTPS_PROXY and NO_PROXY, as every other client here does.
//
// Node 22.21, 24 and later do so by themselves with NODE_USE_ENV_PROXY=1, which sandboxes have; Debian's 18 does not.
// Loaded by NODE_OPTIONS before each program, it does nothing until `fetch` is first used. A program that sets a
// dispatcher of its own keeps it. A refusal becomes an error that says why, where undici's own ProxyAgent only says that
// there was one.
'use strict';

// Where undici, which is what `fetch` is made of, keeps the dispatcher that all its copies share.
const DISPATCHER = Symbol.for('undici.globalDispatcher.1');

const [major, minor] = process.versions.node.split('.').map(Number);
const env = (name) => process.env[name.toLowerCase()] || process.env[name.toUpperCase()];

if ((major < 22 || (major === 22 && minor < 21)) && (env('http_proxy') || env('https_proxy'))) {
  let dispatcher;
  Object.defineProperty(globalThis, DISPATCHER, {
    configurable: true,
    enumerable: false,
    get: () => (dispatcher ??= makeDispatcher()),
    set: (value) => (dispatcher = value),
  });
}

function makeDispatcher() {
  // The parts, not the package: loading that would look for the shared dispatcher, which is being made.
  const Agent = require('/usr/share/nodejs/undici/lib/agent.js');
  const connector = require('/usr/share/nodejs/undici/lib/core/connect.js');
  const direct = connector({});

  return new Agent({
    connect(target, done) {
      const proxy = proxyFor(target);
      if (!proxy) return direct(target, done);
      tunnel(proxy, target, (error, socket) => {
        if (error) return done(error);
        if (target.protocol !== 'https:') return done(null, socket);
        direct({ ...target, httpSocket: socket }, done);
      });
    },
  });
}

function proxyFor({ protocol, hostname, port }) {
  const url = env(protocol === 'https:' ? 'https_proxy' : 'http_proxy');
  return url && !isDirect(hostname, port || (protocol === 'https:' ? '443' : '80')) ? new URL(url) : null;
}

// NO_PROXY: hosts, each with all names below it, each with a port if it has one; or `*`.
function isDirect(hostname, port) {
  return (env('no_proxy') || '')
    .split(/[\s,]+/)
    .filter(Boolean)
    .some((entry) => {
      const [, name, only] = entry.toLowerCase().match(/^\*?\.?(.*?)(?::(\d+))?$/);
      return entry === '*' || ((!only || only === port) && (hostname === name || hostname.endsWith(`.${name}`)));
    });
}

function tunnel(proxy, { hostname, port, protocol }, done) {
  const authority = `${hostname}:${port || (protocol === 'https:' ? 443 : 80)}`;
  const headers = { host: authority };
  if (proxy.username) {
    const credentials = `${decodeURIComponent(proxy.username)}:${decodeURIComponent(proxy.password)}`;
    headers['proxy-authorization'] = `Basic ${Buffer.from(credentials).toString('base64')}`;
  }
  require('http')
    .request({ host: proxy.hostname, port: proxy.port || 80, method: 'CONNECT', path: authority, headers, agent: false })
    .once('connect', (response, socket, head) => {
      if (response.statusCode === 200) {
        if (head.length) socket.unshift(head);
        return done(null, socket);
      }
      socket.destroy();
      done(new Error(`the proxy refused ${authority}: ${response.statusCode} ${response.statusMessage}`));
    })
    .once('error', done)
    .end();
}

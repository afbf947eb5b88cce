"""Node's `fetch` through the image's preload: what it must do besides going by the proxy, and what it must leave alone."""

from tests.clients.conftest import Launch
from tests.clients.corp import BIG_BYTES
from tests.clients.world import CORP, UNNAMED
from tests.support.gateway_process import GatewayProcess

MANY = """
const bodies = await Promise.all([...Array(32)].map(async (_, number) => {
  const reply = await fetch(`${number % 2 ? 'https' : 'http'}://${process.argv[1]}/big`);
  return (await reply.arrayBuffer()).byteLength;
}));
console.log(JSON.stringify(bodies));
"""
OWN_SERVER = """
const server = require('http').createServer((request, reply) => reply.end('at home'));
server.listen(0, '127.0.0.1', async () => {
  for (const host of ['127.0.0.1', 'localhost']) {
    console.log(await (await fetch(`http://${host}:${server.address().port}/`)).text());
  }
  server.closeAllConnections();
  server.close();
});
"""
OWN_DISPATCHER = """
const { Dispatcher, setGlobalDispatcher } = require('undici');
setGlobalDispatcher(new (class extends Dispatcher {
  dispatch() {
    console.log('mine');
    throw new Error('mine');
  }
})());
fetch(process.argv[1]).catch(() => {});
"""
TELL = "fetch(process.argv[1]).then((reply) => console.log(reply.status), (error) => console.log(error.cause.code))"


def test_without_the_preload_there_is_no_way(sandbox: Launch) -> None:
    told = [sandbox("opened").run("node", "-e", TELL, f"https://{CORP}/hello", environment=change).stdout
            for change in ({"NODE_OPTIONS": ""}, {})]  # fmt: skip
    assert told == ["EAI_AGAIN\n", "200\n"]


def test_many_at_once_arrive_whole(sandbox: Launch) -> None:
    done = sandbox("opened").run("node", "--input-type=module", "-e", MANY, CORP)
    assert done.report() == [BIG_BYTES] * 32


def test_a_server_whose_authority_is_not_trusted_is_refused(sandbox: Launch) -> None:
    # Debian's Node also trusts what OpenSSL is told to.
    strict = {"NODE_EXTRA_CA_CERTS": "", "SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt"}
    told = sandbox("opened").run("node", "-e", TELL, f"https://{CORP}/hello", environment=strict).stdout
    assert told in ("SELF_SIGNED_CERT_IN_CHAIN\n", "UNABLE_TO_VERIFY_LEAF_SIGNATURE\n")


def test_a_certificate_for_another_name_is_refused(sandbox: Launch) -> None:
    told = sandbox("opened").run("node", "-e", TELL, f"https://{UNNAMED}/").stdout
    assert told == "ERR_TLS_CERT_ALTNAME_INVALID\n"


def test_servers_inside_the_sandbox_are_reached_directly(sandbox: Launch, gateway: GatewayProcess) -> None:
    before = len(gateway.audit("opened"))
    done = sandbox("opened").run("node", "-e", OWN_SERVER)
    assert done.stdout == "at home\nat home\n", done.output
    assert all(line["event"] == "close" for line in gateway.audit("opened")[before:])


def test_a_dispatcher_of_the_programs_own_is_kept(sandbox: Launch) -> None:
    done = sandbox("opened").run("node", "-e", OWN_DISPATCHER, f"https://{CORP}/hello")
    assert done.stdout == "mine\n", done.output

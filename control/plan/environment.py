"""What a sandbox finds in its environment. Pure."""

from collections.abc import Mapping

from control.plan.container import CA_PATH
from control.plan.network import NetworkSettings


def sandbox_environment(
    session: str,
    run: str,
    token: str,
    network: NetworkSettings,
    extra: Mapping[str, str],
    *,
    ca_bundle: bool,
    openai_provider: str = "",
) -> dict[str, str]:
    """Return what a sandbox finds in its environment. The names are an interface (DESIGN: files and interfaces).

    `extra` is the caller's own and cannot replace any of ours. The operator's model key is never among them: a sandbox
    holds a token that is worth nothing anywhere but at our gateway. `openai_provider` is the gateway's provider that
    OpenAI's clients are led to; empty: none, and they find no key, by whose presence some agents choose a provider.
    """
    gateway = f"{network.gateway_name}:{network.gateway_port}"
    proxy = f"http://{session}:{token}@{gateway}"
    # Clients in the sandbox reach the gateway itself, and servers that the agent starts, without the proxy.
    direct = f"{network.gateway_name},localhost,127.0.0.1"
    ours = {
        "HOME": "/home/node",
        "OPIFICIA_SESSION_ID": session,
        "OPIFICIA_RUN_ID": run,
        "OPIFICIA_RUNNER_URL": f"ws://{gateway}/runner?session={session}",
        "OPIFICIA_RUNNER_TOKEN": token,
        "OPIFICIA_EGRESS_PROXY": proxy,
        "HTTP_PROXY": proxy,
        "HTTPS_PROXY": proxy,
        "NO_PROXY": direct,
        "http_proxy": proxy,
        "https_proxy": proxy,
        "no_proxy": direct,
        # For the `fetch` of Node 22.21, 24 and later; what earlier ones need is a matter of the image.
        "NODE_USE_ENV_PROXY": "1",
        "ANTHROPIC_BASE_URL": f"http://{gateway}/model/{session}",
        "ANTHROPIC_AUTH_TOKEN": token,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_PROVIDER_MANAGED_BY_HOST": "1",
    }
    if openai_provider:
        ours |= {
            "OPENAI_BASE_URL": f"http://{gateway}/model/{session}/{openai_provider}/v1",
            "OPENAI_API_KEY": token,
        }
    if ca_bundle:
        names = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO")
        ours |= dict.fromkeys((*names, "CURL_CA_BUNDLE"), CA_PATH)
    return {**extra, **ours}

"""The commands of `opificia`: options and help. What they do lies in modules of their own, imported when it is done."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from control.cli.egress import egress
from control.cli.host import host, images
from control.cli.out import out
from control.cli.output import EXIT_HOST, as_json, fail, with_client

app = typer.Typer(
    name="opificia",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(egress, name="egress")
app.add_typer(host, name="host")
app.add_typer(images, name="images")
app.add_typer(out, name="out")

Json = Annotated[bool, typer.Option("--json", help="JSON for programs instead of text for people.")]
SessionArg = Annotated[str, typer.Argument(metavar="SESSION", help="The session's id; see `opificia sessions`.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Stay until the session has ended.")]
Raw = Annotated[bool, typer.Option("--raw", help="Do not escape control characters on a terminal.")]


def _show_version(value: bool) -> None:
    if value:
        from gateway.runtime.version import version

        typer.echo(version())
        raise typer.Exit


@app.callback()
def opificia(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the release and exit.")
    ] = False,
) -> None:
    """Run untrusted agents in hardened sandboxes whose only door is a policy gateway."""


@app.command("run")
def run(
    image: Annotated[str, typer.Argument(help="Image of the sandbox, such as opificia-sandbox:latest.")],
    command: Annotated[list[str] | None, typer.Argument(help="Command and arguments, after `--`.")] = None,
    in_dir: Annotated[Path | None, typer.Option("--in", help="Folder to copy to /in (read-only there).")] = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Folder to which /out is copied at the end.")] = None,
    policy: Annotated[Path | None, typer.Option(help="Policy file; the options below change or add to it.")] = None,
    network: Annotated[str, typer.Option(help="none (the default), registries, or open.")] = "",
    allow: Annotated[list[str] | None, typer.Option(help="Also allow host, *.host or host:port; repeatable.")] = None,
    deny: Annotated[list[str] | None, typer.Option(help="Deny it whatever else allows it; repeatable.")] = None,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE, or NAME to pass on.")] = None,
    cwd: Annotated[str, typer.Option(help="Folder in the sandbox in which the command runs.")] = "/work",
    time_limit: Annotated[str, typer.Option(help="End the session after this: 90s, 20m, 2h.")] = "",
    memory: Annotated[str, typer.Option(help="Memory of the sandbox: 512m, 4g.")] = "",
    cpus: Annotated[float, typer.Option(help="CPUs of the sandbox.")] = 0.0,
    budget: Annotated[str, typer.Option(help="Egress bytes in both directions: 200m, 1g.")] = "",
    model: Annotated[list[str] | None, typer.Option(help="Model name that may be used; repeatable.")] = None,
    runtime: Annotated[str, typer.Option(help="Container runtime, such as runsc.")] = "",
    name: Annotated[str, typer.Option(help="Id of the session; made up if not given.")] = "",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    raw: Raw = False,
    json: Json = False,
) -> None:
    """Run a command in a new sandbox; exit with its exit code.

    Ctrl-C stops the session, a second Ctrl-C kills it. Exit codes beside the command's own: 124 time limit, 125 the host
    could not run it, 137 killed or out of memory, 143 stopped.

    Example: opificia run opificia-sandbox:latest --network registries --in . --out results -- npm test
    """
    from control.cli.parse import ParseError, duration_ms, environment, level, size_bytes
    from control.cli.policy import load_policy
    from control.cli.run import RunOptions, run_session
    from control.spec import Resources, SandboxSpec, SessionPolicy
    from gateway.contract.policy import EgressBudget
    from gateway.runtime.settings import SettingsError

    try:
        given = SessionPolicy() if policy is None else load_policy(policy)
        limit = size_bytes("--budget", budget)
        spec = SandboxSpec(
            image=image,
            session_id=name,
            command=tuple(command or ()),
            cwd=cwd,
            env=environment(env or []),
            network=level(network) if network else given.network,
            allow=(*given.allow, *(allow or ())),
            deny=(*given.deny, *(deny or ())),
            egress_budget=EgressBudget(limit, given.egress_budget.connections) if limit else given.egress_budget,
            model_budget=given.model_budget,
            models=(*given.models, *(model or ())),
            resources=Resources(memory_bytes=size_bytes("--memory", memory), cpus=cpus),
            runtime=runtime,
            time_limit_ms=duration_ms("--time-limit", time_limit),
        )
    except (ParseError, SettingsError) as error:
        fail(str(error), 2)
    if not 0 <= cpus < float("inf"):
        fail("--cpus is a number above 0, such as 0.5 or 2", 2)
    if not spec.command:
        fail("there is no command; give one after `--`", 2)
    options = RunOptions(in_dir, out_dir, json, raw, quiet)
    raise SystemExit(with_client(lambda client: run_session(client, spec, options), EXIT_HOST))


@app.command("sessions")
def sessions(
    state: Annotated[list[str] | None, typer.Option(help="Only sessions in this state; repeatable.")] = None,
    reason: Annotated[list[str] | None, typer.Option(help="Only those that ended for this; repeatable.")] = None,
    image: Annotated[str, typer.Option(help="Only those of this image.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="At most this many.")] = 50,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show them again whenever they change.")] = False,
    json: Json = False,
) -> None:
    """List sessions, the newest first.

    Example: opificia sessions --state running --watch
    """
    from control.cli.parse import ParseError, choices
    from control.cli.sessions import show_sessions, watch_sessions
    from control.db.rows import Selection
    from control.plan.session import Reason, SessionState

    try:
        states = choices("--state", SessionState, state or [])
        wanted = Selection(states, choices("--reason", Reason, reason or []), image)
    except ParseError as error:
        fail(str(error), 2)
    act = watch_sessions if watch else show_sessions
    with_client(lambda client: act(client, wanted, limit, json))


@app.command("show")
def show_session(session: SessionArg) -> None:
    """Show one session as JSON, with its usage.

    Example: opificia show my-session
    """
    as_json(with_client(lambda client: client.get(session)))


@app.command("logs")
def logs(
    session: SessionArg,
    follow: Follow = False,
    stream: Annotated[str, typer.Option(help="stdout, stderr, or both.")] = "both",
    timestamps: Annotated[bool, typer.Option("--timestamps", "-t", help="Say when each piece came.")] = False,
    raw: Raw = False,
    json: Json = False,
) -> None:
    """Show a session's output: stdout on stdout, stderr on stderr.

    Example: opificia logs my-session -f --timestamps
    """
    from control.cli.streams import show_logs

    if stream not in ("stdout", "stderr", "both"):
        fail(f"--stream is stdout, stderr or both, not {stream!r}", 2)
    wanted = ("stdout", "stderr") if stream == "both" else (stream,)
    with_client(lambda client: show_logs(client, session, wanted, follow, timestamps, raw, json))


@app.command("events")
def events(session: SessionArg, follow: Follow = False, json: Json = False) -> None:
    """Show what happened to a session.

    Example: opificia events my-session -f
    """
    from control.cli.streams import show_events

    with_client(lambda client: show_events(client, session, follow, json))


@app.command("exec")
def exec_(
    session: SessionArg,
    command: Annotated[list[str], typer.Argument(help="Command and arguments, after `--`.")],
    cwd: Annotated[str, typer.Option(help="Folder in the sandbox in which the command runs.")] = "/work",
    env: Annotated[list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE, or NAME to pass on.")] = None,
    stdin: Annotated[bool, typer.Option("--stdin", "-i", help="Give it this program's stdin.")] = False,
    timeout: Annotated[str, typer.Option(help="End the command after this: 90s, 20m.")] = "",
    raw: Raw = False,
    json: Json = False,
) -> None:
    """Run a command in a session that runs; exit with its exit code. Ctrl-C ends the command.

    Example: opificia exec my-session -- tail -n 20 /work/build.log
    """
    from control.api.types import RunRequest
    from control.cli.parse import ParseError, duration_ms, environment
    from control.cli.streams import run_command
    from control.runner.messages import encode_data

    try:
        data, encoding = encode_data(sys.stdin.buffer.read() if stdin else b"")
        wanted = RunRequest(
            argv=tuple(command),
            cwd=cwd,
            env=environment(env or []),
            stdin=data,
            stdin_encoding=encoding,
            timeout_ms=duration_ms("--timeout", timeout),
        )
    except ParseError as error:
        fail(str(error), 2)
    raise SystemExit(with_client(lambda client: run_command(client, session, wanted, raw, json), EXIT_HOST))


@app.command("stop")
def stop(
    session: SessionArg,
    grace: Annotated[str, typer.Option(help="Time to end by itself before it is killed: 5s; 0s kills.")] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Return when it has ended.")] = False,
    json: Json = False,
) -> None:
    """Stop a session.

    Example: opificia stop my-session --grace 5s --wait
    """
    from control.api.types import SessionView
    from control.cli.parse import ParseError, duration_ms
    from control.client import ControlClient

    try:
        grace_ms = duration_ms("--grace", grace, least=0) if grace else None
    except ParseError as error:
        fail(str(error), 2)

    async def act(client: ControlClient) -> SessionView:
        stopped = await client.stop(session, grace_ms)
        return await client.ended(session) if wait else stopped

    view = with_client(act)
    if json:
        as_json(view)


@app.command("doctor")
def doctor(
    image: Annotated[str, typer.Option(help="Image of the probe sandbox; the configured one if not given.")] = "",
    sandbox: Annotated[bool, typer.Option(help="Try a probe sandbox from inside.")] = True,
    config: Annotated[Path, typer.Option(help="control.toml; its limits are what the probe tries to exceed.")] = Path(
        "/etc/opificia/control.toml"
    ),
    gateway_config: Annotated[
        Path, typer.Option(help="gateway.toml; names the model key that must be nowhere in a sandbox.")
    ] = Path("/etc/opificia/gateway.toml"),
    json: Json = False,
) -> None:
    """Prove that the isolation holds; check the host.

    A probe sandbox tries from inside what an attacker would; each thing that is not well has a remedy. It takes up to half a minute;
    --no-sandbox looks at the host only. Exit code: 0 all is well, 1 something is not.

    Example: opificia doctor --json
    """
    from control.cli.doctor import examine

    raise SystemExit(examine(config, gateway_config, image, sandbox=sandbox, json=json))


@app.command("control", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def control(context: typer.Context) -> None:
    """Run the control daemon, or `control status`.

    Example: opificia control --config /etc/opificia/control.toml --check-config
    """
    if context.args == ["status"]:
        as_json(with_client(lambda client: client.health()))
        return
    _become("control", context.args)


@app.command("gateway", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def gateway(context: typer.Context) -> None:
    """Run the gateway daemon, or `gateway status|sessions`.

    `status` says whether control is connected to it, `sessions` what it serves and what each has used; both take --json.

    Example: opificia gateway sessions
    """
    from control.cli.gateway import show_served, show_status

    match context.args:
        case ["status" | "sessions" as what, *options] if options in ([], ["--json"]):
            act = show_status if what == "status" else show_served
            raise SystemExit(with_client(lambda client: act(client, json=bool(options))))
        case ["status" | "sessions" as what, *_]:
            fail(f"opificia gateway {what} takes no option but --json", 2)
        case arguments:
            _become("gateway", arguments)


def _become(module: str, arguments: list[str]) -> None:
    import os

    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])  # noqa: S606 - our own program, no shell

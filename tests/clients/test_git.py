"""git over HTTPS against a company's server, with its own certificate authority: the whole way of an agent's work."""

from tests.clients.conftest import Launch
from tests.clients.corp import README, REPOSITORY
from tests.clients.world import CORP, World

URL = f"https://{CORP}/git/{REPOSITORY}"
WORK = f"""
set -eu
git config --global user.name Agent
git config --global user.email agent@corp.example
git clone --quiet {URL} /work/clone
cd /work/clone
cat README
git switch --quiet --create answer
head -c 3000000 /dev/urandom > data
git add data
git commit --quiet --message "The answer"
git push --quiet origin answer
git rev-parse HEAD
"""


def test_an_agent_clones_commits_and_pushes(sandbox: Launch, world: World) -> None:
    done = sandbox("opened").run("sh", "-c", WORK)
    assert done.code == 0, done.output
    readme, commit = done.stdout.splitlines()
    assert readme == README.strip()
    # What came over the wire is a whole repository: three megabytes of it, in chunks.
    assert world.corp.head("answer") == commit


def test_a_clone_is_refused_where_no_rule_opens_the_host(sandbox: Launch) -> None:
    done = sandbox("agent").run("git", "clone", URL, "/work/clone")
    assert done.code == 128
    assert "CONNECT tunnel failed, response 403" in done.stderr


def test_a_user_who_asks_git_for_more_sees_the_reason(sandbox: Launch) -> None:
    done = sandbox("agent").run("git", "ls-remote", URL, environment={"GIT_CURL_VERBOSE": "1"})
    assert "403 host_not_listed: this host is not on the list of this session" in done.stderr
    assert "X-Opificia-Reason: host_not_listed" in done.stderr

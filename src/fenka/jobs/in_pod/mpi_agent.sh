#!/bin/sh
# mpirun calls this in place of ssh: `agent HOST COMMAND...`; workers run `agent serve`.
# Without Python in the image, ssh does the same.
directory=$(dirname "$0")
port=${FENKA_AGENT_PORT:-23457}
for python in python3 python; do
    if "$python" -IS -c 'import sys; sys.exit(sys.version_info < (3, 5))' 2>/dev/null; then
        exec "$python" -IS "$directory/agent.py" "$@"
    fi
done

# ssh accepts no private key that others may read.
private=${TMPDIR:-/tmp}/fenka-ssh-$(id -u)
copy_key() {
    umask 077
    mkdir -p "$private" && cp "$directory/ssh-key" "$private/key.$$" &&
        mv "$private/key.$$" "$private/key" &&
        echo "* $(cat "$directory/ssh-key.pub")" >"$private/known.$$" &&
        mv "$private/known.$$" "$private/known"
}

if [ "$1" = serve ]; then
    program=$(command -v sshd || command -v /usr/sbin/sshd)
else
    program=$(command -v ssh)
fi
if [ -z "$program" ]; then
    echo "fenka: this image has neither Python (3.5 or newer) nor ssh and sshd: install one of them in it" >&2
    exit 127
fi
if [ ! -e "$directory/ssh-key" ]; then
    echo "fenka: this image has no Python (3.5 or newer), and the job has no keys for ssh: install Python in the" \
        "image, or ssh-keygen where the job is submitted" >&2
    exit 127
fi
copy_key || exit 127
if [ "$1" = serve ]; then
    mkdir -p /run/sshd 2>/dev/null
    exec "$program" -D -e -f /dev/null -p "$port" -h "$private/key" \
        -o "AuthorizedKeysFile=$directory/ssh-key.pub" -o StrictModes=no -o PidFile=none \
        -o PermitRootLogin=yes -o PasswordAuthentication=no -o UsePAM=no
fi
exec "$program" -i "$private/key" -p "$port" -o IdentitiesOnly=yes -o BatchMode=yes -o LogLevel=ERROR \
    -o "UserKnownHostsFile=$private/known" -o StrictHostKeyChecking=yes "$@"

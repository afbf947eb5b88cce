#!/bin/sh
# Files as file systems: /out of a session is an ext4 of fixed size in a file, so that a full one is the session's
# ENOSPC and not the host's. Runs in the volumes helper, which has loop devices and no capability.
#
#   opificia-volumes create NAME BYTES INODES UID GID    make the file system (not if it is there) and attach it
#   opificia-volumes attach NAME                         attach it again, as after a reboot
#   opificia-volumes remove NAME                         detach and delete it
#
# The device's stable name is /dev/opificia/NAME. Docker mounts by that name: loop numbers are given anew after a
# reboot, and a stale number would be another session's files. create and attach print it.
set -eu
umask 077

image=/volumes/$2.ext4
link=/dev/opificia/$2

attached() {
    losetup --noheadings --output NAME --associated "$image" | head -n 1
}

# A sandbox's start waits for this: no program is run that need not be.
attach() {
    device=$1
    if [ -z "$device" ]; then
        # Another attach may take the device between look-up and use; losetup then says busy.
        device=$(losetup --find --show "$image" || losetup --find --show "$image" || losetup --find --show "$image")
    fi
    [ -d /dev/opificia ] || mkdir -p /dev/opificia
    ln -sfn "$device" "$link"
    echo "$link"
}

format() {
    truncate --size "$4" "$1.new"
    # A journal of 4 MiB keeps results through a crash of the host; nothing is reserved for root.
    mkfs.ext4 -q -F -m 0 -N "$5" -J size=4 -E "root_owner=$6:$7,lazy_itable_init=1,lazy_journal_init=1,nodiscard" "$1.new"
    # lost+found belongs to root and would be listed among the session's results.
    debugfs -w -R "rmdir lost+found" "$1.new" >/dev/null 2>&1
    mv "$1.new" "$1"
}

remove() {
    rm -f "$link" "$image.new"
    [ -e "$image" ] || return 0
    device=$(attached)
    # Emptied first: should something still hold the device, at least the disk is free.
    truncate --size 0 "$image"
    [ -z "$device" ] || losetup --detach "$device"
    rm -f "$image"
}

case $1 in
create)
    if [ -e "$image" ]; then
        attach "$(attached)"
    else
        # Made once for each size; a copy, of which nearly all is a hole, costs a third of it.
        blank=/volumes/blank-$3-$4-$5-$6
        [ -e "$blank" ] || format "$blank" "$@"
        cp --sparse=always "$blank" "$image.new"
        mv "$image.new" "$image"
        attach ""
    fi
    ;;
attach) attach "$(attached)" ;;
remove) remove ;;
*)
    echo "opificia-volumes: no such action: $1" >&2
    exit 64
    ;;
esac

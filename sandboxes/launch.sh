# Starts one Apptainer sandbox: joins its control groups, makes its file systems, gives up root, becomes apptainer.
# As root it runs in a mount namespace of its own, so that every mount here ends with the sandbox's last process.
# Usage: launch APPTAINER ARGUMENTS...; what to do is said by variables:
#   LAUNCH_GROUPS       files of control groups to join, one a line
#   LAUNCH_SPACE        a folder for what the sandbox writes ("data") and apptainer's own settings ("conf")
#   LAUNCH_FILE_BLOCKS  limit of one file, in blocks of 512 bytes
# and as root:
#   LAUNCH_USER, LAUNCH_GROUP  whom to become        LAUNCH_BYTES  size of the file system that LAUNCH_SPACE gets
#   LAUNCH_IMAGE               the image, which that user will find at "image" in LAUNCH_SPACE
#   LAUNCH_BINDS               what else it is to see, one a line, at "bind0", "bind1" ... in LAUNCH_SPACE
set -eu
echo "$LAUNCH_GROUPS" | while read -r file; do
  if [ -n "$file" ]; then echo "$$" >"$file"; fi
done
if [ -n "${LAUNCH_FILE_BLOCKS-}" ]; then ulimit -f "$LAUNCH_FILE_BLOCKS"; fi
if [ -n "${LAUNCH_USER-}" ]; then
  mount -t tmpfs -o "size=$LAUNCH_BYTES,mode=0711,nosuid" tmpfs "$LAUNCH_SPACE"
  show() {
    if [ -d "$1" ]; then mkdir "$2"; else : >"$2"; fi
    mount --bind "$1" "$2"
  }
  show "$LAUNCH_IMAGE" "$LAUNCH_SPACE/image"
  number=0
  while read -r source; do
    if [ -n "$source" ]; then show "$source" "$LAUNCH_SPACE/bind$number"; fi
    number=$((number + 1))
  done <<SOURCES
$LAUNCH_BINDS
SOURCES
  # Image files are mounted through FUSE, whose device many hosts keep for root.
  if mknod -m 0666 "$LAUNCH_SPACE/fuse" c 10 229; then mount --bind "$LAUNCH_SPACE/fuse" /dev/fuse || true; fi
fi
mkdir -m 0700 "$LAUNCH_SPACE/data" "$LAUNCH_SPACE/conf"
if [ -n "${LAUNCH_USER-}" ]; then
  chown "$LAUNCH_USER:$LAUNCH_GROUP" "$LAUNCH_SPACE/data" "$LAUNCH_SPACE/conf"
  set -- setpriv --reuid="$LAUNCH_USER" --regid="$LAUNCH_GROUP" --clear-groups -- "$@"
fi
unset LAUNCH_GROUPS LAUNCH_SPACE LAUNCH_FILE_BLOCKS LAUNCH_USER LAUNCH_GROUP LAUNCH_BYTES LAUNCH_IMAGE LAUNCH_BINDS
exec "$@"

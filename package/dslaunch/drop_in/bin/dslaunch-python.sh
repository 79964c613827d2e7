# Sourced by the commands beside it: sets $python to one that has dslaunch.
python=${DSLAUNCH_PYTHON:-}
if [ -z "$python" ]; then
    python=python3
    here=$(dirname "$(readlink -f "$0")")
    case $here in
    */lib/python3*/*-packages/dslaunch/drop_in/bin) # installed: the environment's own
        [ -x "$here/../../../../../../bin/python3" ] && python=$here/../../../../../../bin/python3
        ;;
    esac
fi

"""Words by which one half finds what the other one wrote."""

NETWORK = "dslaunch network: "  # stands before the answer of rank 0 to `dslaunch check`
GPU = "dslaunch gpu: "  # stands before the answer of each rank to `dslaunch check`
SPEEDS = "dslaunch speeds: "  # the same, of what a rank reaches while all others work, too
SPAN = "dslaunch: "  # stands before the names of our ranges among torch's own in a trace

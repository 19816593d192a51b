"""The engines that a command starts for an environment: a scripted policy, and the models of other pools."""

from lily_mlx.cli import main

main()

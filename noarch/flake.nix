{
  description = "Mixture-of-experts on grouped GEMM, a Hugging Face Hub kernel: the build without native code";

  inputs.kernel-builder.url = "github:huggingface/kernels";

  outputs =
    { self, kernel-builder }:
    let
      inherit (kernel-builder.inputs) nixpkgs;

      # The builder expects build.toml beside the sources, where the CUDA build has its own: a tree of the sources with
      # this build.toml. Its files are copied into the store again, as the builder asks for a path without context.
      treeFor =
        system:
        let
          tree = nixpkgs.legacyPackages.${system}.runCommandLocal "grouped-moe-noarch" { } ''
            mkdir $out
            cp -r ${../torch-ext} $out/torch-ext
            cp -r ${../tests} $out/tests
            cp -r ${../benchmarks} $out/benchmarks
            cp ${../CARD.md} $out/CARD.md
            cp ${./build.toml} $out/build.toml
          '';
        in
        builtins.seq (builtins.readDir tree) (/. + builtins.unsafeDiscardStringContext tree);

      outputsFor =
        system:
        kernel-builder.lib.genKernelFlakeOutputs {
          inherit self;
          path = treeFor system;
        };

      systems = [
        "aarch64-darwin"
        "aarch64-linux"
        "x86_64-linux"
      ];
    in
    nixpkgs.lib.genAttrs [ "packages" "devShells" ] (
      kind: nixpkgs.lib.genAttrs systems (system: (outputsFor system).${kind}.${system})
    );
}

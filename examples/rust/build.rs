//! Generates kvferry's messages, and a client for the unary methods of its services.
//!
//! tonic-build would generate the client too, and tonic would call it. Where crates.io is at hand, use those: this shows
//! that the protos alone are enough.

use std::path::{Path, PathBuf};

struct Stubs;

impl prost_build::ServiceGenerator for Stubs {
    fn generate(&mut self, service: prost_build::Service, code: &mut String) {
        let (name, path) = (&service.name, format!("{}.{}", service.package, service.proto_name));
        *code += &format!("pub struct {name}Client<'a>(pub &'a mut crate::unary::Connection);\nimpl {name}Client<'_> {{\n");
        for method in service.methods.iter().filter(|one| !one.client_streaming && !one.server_streaming) {
            let (ask, answer) = (&method.input_type, &method.output_type);
            *code += &format!(
                "pub async fn {}(&mut self, request: &{ask}) -> Result<{answer}, crate::unary::Status> {{\n\
                 self.0.call(\"/{path}/{}\", request).await\n}}\n",
                method.name, method.proto_name
            );
        }
        *code += "}\n";
    }
}

fn main() -> std::io::Result<()> {
    let protos = PathBuf::from(std::env::var("KVFERRY_PROTOS").unwrap_or("../../protos".into()));
    let files = ["admin", "errors", "geometry", "introspection", "kv_transfer"]
        .map(|name| protos.join(Path::new("kvferry/v1")).join(name).with_extension("proto"));
    prost_build::Config::new().service_generator(Box::new(Stubs)).compile_protos(&files, &[protos])
}

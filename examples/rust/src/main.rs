//! Says what a kvferry node server is and which engines it has, and declines references: a client in Rust, made from the
//! protos alone.
//!
//! usage: kvferry-example NODE_SERVER [REFERENCE ...]

mod unary;

#[allow(clippy::all, dead_code)]
mod kvferry {
    include!(concat!(env!("OUT_DIR"), "/kvferry.v1.rs"));
}

use kvferry::notification::Kind as Said;
use kvferry::notification_result::Kind as Answered;
use kvferry::{Decline, GetServerInfoRequest, IntrospectionClient, KvTransferClient, ListEnginesRequest};
use kvferry::{EngineState, Notification, NotifyRequest, Version};
use unary::{Connection, Status};

async fn run(address: &str, references: &[String]) -> Result<(), Status> {
    let mut connection = Connection::open(address).await?;
    let mut introspection = IntrospectionClient(&mut connection);
    let info = introspection.get_server_info(&GetServerInfoRequest::default()).await?;
    println!("kvferryd {} at {}", info.version, info.advertise);
    let mut request = ListEnginesRequest::default();
    loop {
        let page = introspection.list_engines(&request).await?;
        for summary in page.engines {
            let state = EngineState::from_i32(summary.state).unwrap_or_default().as_str_name();
            let engine = summary.engine.unwrap_or_default();
            let incarnation: String = engine.incarnation.iter().map(|byte| format!("{byte:02x}")).collect();
            println!("engine {} {incarnation} {state}", engine.engine_id);
        }
        request.page_token = page.next_page_token;
        if request.page_token.is_empty() {
            break;
        }
    }
    // The contract that this program was made for; see the protos.
    let version = Version { contract_revision: 2, release: "examples/rust".into(), ..Default::default() };
    for reference in references {
        let decline = Decline { reference: reference.clone(), ..Default::default() };
        let notification = Notification { kind: Some(Said::Decline(decline)) };
        let request =
            NotifyRequest { notifications: vec![notification], version: Some(version.clone()), ..Default::default() };
        let answer = KvTransferClient(&mut connection).notify(&request).await?;
        for result in answer.results {
            // The call may go well, and the decline be refused.
            match result.kind {
                Some(Answered::Error(error)) => println!("{} [{}]", error.message, error.reason().as_str_name()),
                _ => println!("declined"),
            }
        }
    }
    Ok(())
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let ended = arguments.split_first().map(|(address, references)| runtime.block_on(run(address, references)));
    match ended {
        Some(Ok(())) => (),
        Some(Err(status)) => {
            eprintln!("{status}");
            std::process::exit(1);
        }
        None => {
            eprintln!("usage: kvferry-example NODE_SERVER [REFERENCE ...]");
            std::process::exit(2);
        }
    }
}
